"""Hugging Face models as they are: captured, quantized dynamically, exported with dynamic batch and length, verified."""

from __future__ import annotations

import pytest
import torch

import compresskit as ck
from compresskit.quant import quantize_dynamic

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and of the libraries it loads

BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": 50, "max_position_embeddings": 64}


def bert():
    return transformers.BertModel(transformers.BertConfig(**BERT, **TEXT))


def distilbert():
    how = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**how, **TEXT))


def minilm():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, **TEXT))


def gpt2():
    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    how = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**how, **ends))


def t5_encoder():
    how = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    return transformers.T5EncoderModel(transformers.T5Config(**how))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**BERT, image_size=32, patch_size=8))


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Ids and a mask; the last row is half as long."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, (length + 1) // 2 :] = 0
    return {"input_ids": torch.randint(5, 50, (rows, length)), "attention_mask": mask}


def pictures(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 32, 32)}


@pytest.mark.parametrize("make", [bert, distilbert, minilm, gpt2, t5_encoder, vit], ids=lambda f: f.__name__)
def test_family(make, tmp_path) -> None:
    model = make().eval()
    data, dynamic = (pictures, (0,)) if make is vit else (text, (0, 1))
    quantized = quantize_dynamic(model, data(2, 6), dynamic=dynamic)
    output = quantized(**data(2, 6))
    assert type(output) is type(model(**data(2, 6)))
    file = ck.export_onnx(quantized, tmp_path / "q.onnx", data(2, 6))
    proof = ck.verify_onnx(file, quantized, [data(3, 9), data(1, 5), data(2, 6)])
    assert proof.passed, proof
    floating = [reason for name, reason in quantized.placement.floating.items() if name in quantized.placement.costs]
    assert len(floating) == (1 if make is vit else 0)  # the patches of an image are a convolution, quantized on request
    assert "Attention" in ck.audit(file).operators or make is t5_encoder
