"""Megatron must be importable where Transformer Engine is installed but cannot load libcuda."""

import sys
import tempfile
from pathlib import Path

from _common import DEFECT, RIGHT, hide_gpu, report, run

NO_DRIVER = "libcuda.so.1: cannot open shared object file: No such file or directory"


def main() -> int:
    hide_gpu(hide_transformer_engine=False)
    with tempfile.TemporaryDirectory() as site:
        package = Path(site, "transformer_engine")
        package.mkdir()
        package.joinpath("__init__.py").write_text(f"raise OSError({NO_DRIVER!r})\n")
        sys.path.insert(0, site)
        try:
            import megatron.core
            from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
            from megatron.core.models.hybrid import hybrid_model
        except OSError as error:
            if str(error) != NO_DRIVER:
                raise
            return report(DEFECT, f"import megatron.core: OSError: {error}")
    assert hybrid_model.HybridModel and not HAVE_TE, "TE counts as present"
    try:
        TENorm(config=None, hidden_size=8)
    except ImportError as error:
        refusal = str(error).split(".")[0]
    where = Path(megatron.core.__file__).parent
    return report(RIGHT, f"{where} imported without TE; TENorm refuses: {refusal}")


run(main)
