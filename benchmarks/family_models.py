"""The networks of `families.py`: one small variant of every timm module, and Hugging Face architectures with tiny configs.

`build(name)` gives a `Family`: the model in eval mode with seeded random weights, a function that makes inputs for a batch and a
length, and which of their dimensions vary. A name is `timm/<module>` or `hf/<model type>`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SIZES = (64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448)  # of images, tried from the smallest


@dataclass(frozen=True, kw_only=True)
class Family:
    """A network, its inputs for (samples, seed, length), and the dimensions of them that an export may leave open."""

    model: nn.Module
    variant: str
    inputs: Callable[[int, int, int], Any]
    dynamic: tuple[int, ...]


def timm_names() -> list[str]:
    """Every module of timm with models in it."""
    import timm

    return [f"timm/{module}" for module in timm.list_modules() if timm.list_models(module=module)]


#: Words in the names of relatives that are larger than others, which need not be counted where others are left.
LARGER = re.compile(
    r"large|huge|giant|gigantic|enormous|base|medium|xl|_[bcms]?[3-9]\d?(_|$|[a-z])|(50|101|152|161|169|200|201|264|269|270|350|420)"
    r"|_[ml](_|$)|_in21k|_b[1-9]|so\d+m|pe_|_384|_448|_512"
)
#: Settings that leave one or two blocks of each stage, tried in this order; most constructors take one of them.
SHALLOW: tuple[dict[str, Any], ...] = (
    {"depth": 2},
    {"depths": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {"depths": (1, 1, 1)},
    {},
)


def smallest_variant(module: str) -> str:
    """The model of a timm module with the fewest parameters, counted on the meta device."""
    import timm

    names = timm.list_models(module=module)
    sizes: dict[str, int] = {}
    for name in [n for n in names if not LARGER.search(n)] or names:
        try:
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in timm.create_model(name, num_classes=10).parameters())
        except Exception:
            continue  # computes with values when it is made; larger relatives of it usually do so, too
    return min(sizes, key=lambda name: sizes[name]) if sizes else names[0]


def timm_family(module: str, variant: str | None) -> Family:
    """The smallest variant, with few blocks where its constructor takes their number, on the smallest image that it takes."""
    variant = variant or smallest_variant(module)
    last: Exception | None = None
    for shallow in SHALLOW:
        for size in SIZES:
            for settings in ({"img_size": size}, {}):
                try:
                    model = timm_model(variant, size, shallow | settings)
                except Exception as error:
                    last = error
                    continue
                how = "".join(f", {name}={value}" for name, value in shallow.items())
                return Family(
                    model=settled(model, images(size)), variant=f"{variant} at {size}{how}", inputs=images(size), dynamic=(0,)
                )
            if isinstance(last, TypeError) and "unexpected keyword" in str(last) and shallow:
                break
    raise RuntimeError(f"{variant} runs on no size of {SIZES}: {last}")


def timm_model(variant: str, size: int, settings: dict[str, Any]) -> nn.Module:
    """The model, once it has run on images of that size; fails where it does not take them."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(variant, num_classes=10, **settings).eval()
    with torch.no_grad():
        model(torch.randn(2, 3, size, size))
    return model


def images(size: int) -> Callable[[int, int, int], Any]:
    """Random images."""

    def make(samples: int, seed: int, length: int) -> tuple[Tensor, ...]:
        return (torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(seed)),)

    return make


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on a tuple or a dict of inputs."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def settled(model: nn.Module, make: Callable[[int, int, int], Any]) -> nn.Module:
    """Random values where a parameter is nearly zero, and BatchNorm statistics of two random batches."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith("bias") and p.numel() > 1 and float(p.abs().max()) < 0.01:
                p.copy_(
                    torch.rand(p.shape, generator=generator) * 0.2 + 0.2
                    if p.ndim < 2 or "gamma" in name
                    else torch.randn(p.shape, generator=generator) * 0.05
                )
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for module in norms:
            module.momentum = None
        if norms:
            for seed in (2, 3):
                call(model.train(), make(8, seed, 16))
    return model.eval()


#: What makes a config small, where it has an entry of that name.
TINY: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "emb_dim": 64, "embedding_size": 64,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "intermediate_size": 128,
    "ffn_dim": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_ff": 128, "hidden_dim": 128, "d_kv": 16, "head_dim": 16,
    "max_position_embeddings": 96, "n_positions": 96, "n_ctx": 96, "initializer_range": 0.1, "init_std": 0.1, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 10, "image_size": 64, "patch_size": 16,
    "rotary_dim": 8, "n_inner": 128, "hidden_dropout_prob": 0.0, "decoder_start_token_id": 1,
}  # fmt: skip

SEQUENCE, CAUSAL, SEQ2SEQ, IMAGES, AUDIO, DENSE = (
    f"AutoModelFor{kind}"
    for kind in (
        "SequenceClassification",
        "CausalLM",
        "Seq2SeqLM",
        "ImageClassification",
        "AudioClassification",
        "SemanticSegmentation",
    )
)
CONVS = {"conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
                    "num_conv_pos_embeddings": 16,
         "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 32, "mask_time_length": 2}  # fmt: skip
STAGES = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [2, 4], "sr_ratios": [2, 1],
          "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32}  # fmt: skip
#: Model type -> (class, entries of the config besides TINY; None leaves an entry of TINY out).
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": (SEQUENCE, {}),
    "roberta": (SEQUENCE, {}),
    "distilbert": (SEQUENCE, {}),
    "albert": (SEQUENCE, {"embedding_size": 32}),
    "electra": (SEQUENCE, {"embedding_size": 32}),
    "mobilebert": (SEQUENCE, {"embedding_size": 32, "intra_bottleneck_size": 32, "num_feedforward_networks": 2}),
    "deberta": (SEQUENCE, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 64}),
    "deberta-v2": (SEQUENCE, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
                              "norm_rel_ebd": "layer_norm", "share_att_key": True, "pooler_hidden_size": 64}),
    "mpnet": (SEQUENCE, {}),
    "xlm-roberta": (SEQUENCE, {}),
    "camembert": (SEQUENCE, {}),
    "fnet": (SEQUENCE, {}),
    "squeezebert": (SEQUENCE, {"embedding_size": 64}),
    "convbert": (SEQUENCE, {"embedding_size": 32, "head_ratio": 2}),
    "funnel": (SEQUENCE, {"num_hidden_layers": None, "block_sizes": [1, 1], "d_head": 16, "d_inner": 128,
                    "num_decoder_layers": 1}),
    "big_bird": (SEQUENCE, {"block_size": 8, "attention_type": "original_full"}),
    "longformer": (SEQUENCE, {"attention_window": [4, 4]}),
    "nystromformer": (SEQUENCE, {"num_landmarks": 4, "segment_means_seq_len": 16, "conv_kernel_size": 3}),
    "roformer": (SEQUENCE, {"embedding_size": 32}),
    "yoso": (SEQUENCE, {"use_expectation": True}),
    "modernbert": (SEQUENCE, {"global_attn_every_n_layers": 2, "local_attention": 8, "reference_compile": False}),
    "ernie": (SEQUENCE, {}),
    "rembert": (SEQUENCE, {"input_embedding_size": 32, "output_embedding_size": 32}),
    "mra": (SEQUENCE, {}),
    "xlnet": (SEQUENCE, {"d_inner": 128, "max_position_embeddings": None}),
    "flaubert": (SEQUENCE, {}),
    "layoutlm": (SEQUENCE, {}),
    "gpt2": (CAUSAL, {}),
    "gpt_neo": (CAUSAL, {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt_neox": (CAUSAL, {}),
    "gptj": (CAUSAL, {}),
    "gpt_bigcode": (CAUSAL, {}),
    "opt": (CAUSAL, {"word_embed_proj_dim": 64}),
    "bloom": (CAUSAL, {}),
    "llama": (CAUSAL, {}),
    "mistral": (CAUSAL, {"sliding_window": 8}),
    "mixtral": (CAUSAL, {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "qwen2": (CAUSAL, {}),
    "qwen3": (CAUSAL, {}),
    "gemma": (CAUSAL, {}),
    "gemma2": (CAUSAL, {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "phi": (CAUSAL, {"num_key_value_heads": 4}),
    "phi3": (CAUSAL, {"original_max_position_embeddings": 96}),
    "falcon": (CAUSAL, {"num_kv_heads": 2, "new_decoder_architecture": True, "head_dim": None}),
    "stablelm": (CAUSAL, {}),
    "codegen": (CAUSAL, {}),
    "olmo": (CAUSAL, {}),
    "cohere": (CAUSAL, {}),
    "starcoder2": (CAUSAL, {}),
    "granite": (CAUSAL, {}),
    "mpt": (CAUSAL, {"max_seq_len": 96}),
    "xglm": (CAUSAL, {"attention_heads": 4}),
    "biogpt": (CAUSAL, {}),
    "mamba": (CAUSAL, {"state_size": 4, "time_step_rank": 4, "intermediate_size": 128}),
    "t5": (SEQ2SEQ, {}),
    "mt5": (SEQ2SEQ, {"feed_forward_proj": "gated-gelu"}),
    "bart": (SEQ2SEQ, {}),
    "mbart": (SEQ2SEQ, {}),
    "marian": (SEQ2SEQ, {"forced_eos_token_id": 2}),
    "pegasus": (SEQ2SEQ, {}),
    "blenderbot": (SEQ2SEQ, {}),
    "m2m_100": (SEQ2SEQ, {}),
    "led": (SEQ2SEQ, {"attention_window": [4, 4], "max_encoder_position_embeddings": 96, "max_decoder_position_embeddings": 96}),
    "vit": (IMAGES, {}),
    "deit": ("DeiTForImageClassification", {"num_labels": 10}),
    "beit": (IMAGES, {"use_relative_position_bias": True, "layer_scale_init_value": 0.3, "out_indices": [0, 1]}),
    "data2vec-vision": (IMAGES, {"use_relative_position_bias": True, "layer_scale_init_value": 0.3}),
    "dinov2": (IMAGES, {"layerscale_value": 0.3}),
    "swin": (IMAGES, {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}),
    "swinv2": (IMAGES, {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4,
                        "pretrained_window_sizes": [0, 0]}),
    "donut-swin": (IMAGES, {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}),
    "convnext": (IMAGES, {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "layer_scale_init_value": 0.3,
                    "patch_size": 4}),
    "convnextv2": (IMAGES, {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4}),
    "mobilevit": (IMAGES, {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [16, 16, 24, 32, 32, 32, 64], "patch_size": 2}),
    "mobilenet_v1": (IMAGES, {"depth_multiplier": 0.5}),
    "mobilenet_v2": (IMAGES, {"depth_multiplier": 0.5}),
    "segformer": (DENSE, STAGES),
    "poolformer": (IMAGES, {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "layer_scale_init_value": 0.3}),
    "resnet": (IMAGES, {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]}),
    "regnet": (IMAGES, {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "groups_width": 8}),
    "levit": ("LevitForImageClassification", {"num_labels": 10, "hidden_sizes": [32, 48, 64], "mlp_ratio": [2, 2, 2],
                    "attention_ratio": [2, 2, 2], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [16, 16, 16],
                       "down_ops": [["Subsample", 16, 2, 4, 2, 2], ["Subsample", 16, 3, 4, 2, 2]]}),
    "cvt": (IMAGES, {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "mlp_ratio": [2.0, 2.0, 2.0],
                     "drop_path_rate": [0.0, 0.0, 0.0]}),
    "pvt_v2": (IMAGES, {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
                        "mlp_ratios": [2, 2, 2, 2], "sr_ratios": [4, 2, 2, 1]}),
    "focalnet": (IMAGES, {"embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32], "focal_levels": [2, 2],
                    "focal_windows": [3, 3],
                          "patch_size": 4}),
    "efficientnet": (IMAGES, {"width_coefficient": 0.35, "depth_coefficient": 0.3, "hidden_dim": 448}),
    "bit": (IMAGES, {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4}),
    "dpt": (DENSE, {"neck_hidden_sizes": [8, 16, 16, 32], "fusion_hidden_size": 16, "backbone_out_indices": [0, 1, 2, 3],
                    "num_hidden_layers": 4, "reassemble_factors": [4, 2, 1, 0.5], "use_auxiliary_head": False}),
    "yolos": ("YolosForObjectDetection", {"image_size": [64, 64], "num_detection_tokens": 5,
                    "use_mid_position_embeddings": False}),
    "clip_vision_model": ("CLIPVisionModelWithProjection", {"projection_dim": 32}),
    "siglip_vision_model": ("SiglipVisionModel", {}),
    "wav2vec2": (AUDIO, CONVS),
    "hubert": (AUDIO, CONVS),
    "wavlm": (AUDIO, CONVS),
    "data2vec-audio": (AUDIO, CONVS),
    "unispeech": (AUDIO, CONVS),
    "sew": (AUDIO, CONVS | {"squeeze_factor": 2}),
    "wav2vec2-conformer": (AUDIO, CONVS | {"conformer_conv_dropout": 0.0}),
    "whisper": ("WhisperForConditionalGeneration", {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}),
    "audio-spectrogram-transformer": (AUDIO, {"max_length": 64, "num_mel_bins": 32}),
    "speech_to_text": ("Speech2TextForConditionalGeneration", {"num_mel_bins": 16, "input_feat_per_channel": 16,
                    "conv_channels": 32,
                                                               "max_source_positions": 64, "max_target_positions": 32}),
}  # fmt: skip


def hugging_face_names() -> list[str]:
    """Those above that this version of transformers has."""
    return [f"hf/{name}" for name in HUGGING_FACE]


def hugging_face_family(name: str) -> Family:
    """A tiny config of an architecture, with a head on it."""
    import transformers

    cls, settings = HUGGING_FACE[name]
    default = transformers.AutoConfig.for_model(name)
    known = {k: v for k, v in TINY.items() if hasattr(default, k) or k in default.attribute_map}
    known.pop("head_dim", None) if getattr(default, "head_dim", None) is None else None
    dropped = {k for k, v in settings.items() if v is None}
    aliased = {default.attribute_map.get(k) for k in settings}
    settings = {k: v for k, v in settings.items() if v is not None}
    known = {
        k: v
        for k, v in known.items()
        if k not in dropped and k not in aliased and default.attribute_map.get(k) not in {*settings, *known}
    }
    if not cls.startswith("Auto"):
        known.pop("num_labels", None)
    config = transformers.AutoConfig.for_model(name, **(known | settings))
    torch.manual_seed(0)
    kind = getattr(transformers, cls)
    model = (kind.from_config(config) if cls.startswith("Auto") else kind(config)).eval()
    inputs, dynamic = hugging_face_inputs(cls, config, model)
    return Family(model=settled(model, inputs), variant=type(model).__name__, inputs=inputs, dynamic=dynamic)


def hugging_face_inputs(cls: str, config: Any, model: nn.Module) -> tuple[Callable[[int, int, int], Any], tuple[int, ...]]:
    """Inputs by name: token ids and a mask, images, waveforms or spectrograms."""
    arguments = inspect.signature(model.forward).parameters

    def make(samples: int, seed: int, length: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 100, (samples, length), generator=generator)
        if "pixel_values" in arguments:
            size = getattr(config, "image_size", 64) or 64
            size = size if isinstance(size, int) else size[0]
            return {"pixel_values": torch.randn(samples, 3, min(size, 64), min(size, 64), generator=generator)}
        if "input_features" in arguments or ("input_values" in arguments and "audio-spectrogram" in config.model_type):
            name = "input_features" if "input_features" in arguments else "input_values"
            bins = config.num_mel_bins
            frames = {"whisper": 64, "audio-spectrogram-transformer": 64}.get(config.model_type, 48)
            features = torch.randn(
                samples, *((bins, frames) if config.model_type == "whisper" else (frames, bins)), generator=generator
            )
            return {name: features, **({"decoder_input_ids": ids} if "decoder_input_ids" in arguments else {})}
        if "input_values" in arguments:
            return {"input_values": torch.randn(samples, length * 100, generator=generator)}
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "decoder_input_ids" in arguments and cls == SEQ2SEQ:
            found["decoder_input_ids"] = torch.randint(3, 100, (samples, length), generator=generator)
        return {k: v for k, v in found.items() if k in arguments}

    text = "input_ids" in arguments and "pixel_values" not in arguments
    waves = cls == AUDIO and "spectrogram" not in config.model_type
    return make, (0, 1) if text or waves else (0,)


def build(name: str, variant: str | None = None) -> Family:
    """The network of a name; `variant` is the one that was found to be the smallest, where it is known."""
    library, _, family = name.partition("/")
    return timm_family(family, variant) if library == "timm" else hugging_face_family(family)
