"""`python -m megacpp_mcore.pages [ROOT]`: fill the generated blocks of README.md and docs/, and
write the table of receipts. Prints what has changed."""

import sys
from pathlib import Path

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import write_atomically
from megacpp_mcore.pages.blocks import pages
from megacpp_mcore.receipts.table import table
from megacpp_mcore.surfaces.figures import claims_by_receipt


def main(root: Path) -> None:
    """Raises PageError for a block that cannot be written; then nothing is."""
    found = list(pages(root))
    changed = [page.path for page in found if page.text != page.filled]
    for page in found:
        if page.text != page.filled:
            write_atomically(page.path, page.filled)
    folder = root / "examples/receipts"
    listed = table(folder, claims_by_receipt())
    if (folder / "README.md").read_text() != listed:
        write_atomically(folder / "README.md", listed)
        changed.append(folder / "README.md")
    for path in changed:
        print(path.relative_to(root))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
    except MegacppError as error:
        sys.exit(f"megacpp: {error}")
