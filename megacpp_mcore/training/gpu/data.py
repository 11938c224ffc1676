"""The datasets of a GPU run: Megatron's GPTDataset on `.bin`/`.idx` pairs, or mock data."""

from typing import Any

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def datasets_provider(num_samples: list[int | None], vp_stage: int | None = None) -> tuple:
    """Megatron's dataset provider: (train, valid, test), built on the ranks that read them.

    num_samples: of the three splits. Mock data is used only if the recipe sets data.mock_data.
    """
    args = get_args()

    def reads() -> bool:
        if mpu.get_tensor_model_parallel_rank() != 0:
            return False
        # with packed documents every pipeline stage needs the offsets
        return (
            args.dataloader_inter_document_masking
            or is_first_or_last_pipeline_stage(vp_stage)
            or mtp_on_this_rank(mtp_num_layers=args.mtp_num_layers, ignore_virtual=False,
                                vp_stage=vp_stage)
        )  # fmt: skip

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, reads, dataset_config(args)).build()


datasets_provider.is_distributed = True  # Megatron calls it on every rank


def dataset_config(args: Any) -> GPTDatasetConfig:
    """The dataset config from Megatron's arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
