"""Our linear kernels against torch's and bitsandbytes' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gpu_worker import linears, native
from gpu_worker.linears import Nf4Linear, PackedLinear, PackedShape

bitsandbytes = pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    native.load(native.cache_directory(""))
    if not torch.ops.loadonce.has_bf16_dot():
        pytest.skip("this processor has no bfloat16 dot product")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def assert_close(ours: Tensor, exact: Tensor) -> None:
    assert float((ours.double() - exact).norm() / exact.norm()) < 0.005


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("depth", [32, 77, 576])
@pytest.mark.parametrize("columns", [3, 64, 1537])
@pytest.mark.parametrize("rows", [1, 6, 7, 64, 130])
def test_a_linear_layer_of_any_shape(rows: int, columns: int, depth: int, bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(depth, columns, bias=bias)).to(torch.bfloat16)
    x = torch.randn(1, rows, depth).to(torch.bfloat16)
    exact = nn.functional.linear(
        x.double(), model[0].weight.double(), model[0].bias.double() if bias else None
    )

    assert linears.use_kernels(model) == 1

    assert isinstance(model[0], PackedLinear)
    with torch.inference_mode():
        assert_close(model(x), exact)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 64, 130])
def test_a_4_bit_layer_keeps_its_weights(rows: int, nested: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(
        576, 200, bias=bias, compute_dtype=torch.bfloat16, compress_statistics=nested, quant_type="nf4"
    ).to(torch.bfloat16)
    model = nn.Sequential(layer).to("cpu")
    weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    x = torch.randn(1, rows, 576).to(torch.bfloat16)
    exact = nn.functional.linear(x.double(), weight.double(), layer.bias.double() if bias else None)

    assert linears.use_kernels(model) == 1

    assert isinstance(model[0], Nf4Linear)
    with torch.inference_mode():
        assert_close(model(x), exact)


def test_a_layer_built_from_the_shape_alone_has_the_same_tensors() -> None:
    layer = bitsandbytes.nn.Linear4bit(64, 32, compute_dtype=torch.bfloat16, quant_type="nf4")
    model = nn.Sequential(layer.to(torch.bfloat16)).to("cpu")
    linears.use_kernels(model)
    [(name, shape)] = linears.nf4_shapes(model).items()
    built = Nf4Linear.like(shape)
    assert name == "0"
    assert {n: (t.dtype, t.shape) for n, t in built.named_buffers()} == {
        n: (t.dtype, t.shape) for n, t in model[0].named_buffers()
    }


def test_layers_that_the_kernel_can_not_compute_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(4, 8))
    assert linears.use_kernels(model) == 0


class WithHead(nn.Module):
    """A model whose output head is tied to its embedding."""

    def __init__(self, vocab: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, depth)
        self.head = nn.Linear(depth, vocab)
        self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize("rows", [1, 5, 96, 200])
def test_the_output_heads_logits_are_not_rounded(rows: int) -> None:
    """Two near rivals stay two: rounded, their logits could be equal, and the order would choose."""
    torch.manual_seed(rows)
    model = WithHead(37, 64).to(torch.bfloat16)
    x = torch.randn(rows, 64).bfloat16()
    weight, bias = model.embed.weight.detach().clone(), model.head.bias.detach().clone()
    linears.use_kernels(model)
    with torch.inference_mode():
        ours = model(x)
        exact = x.double() @ weight.double().T + bias.double()
    assert ours.dtype is torch.float32
    assert float((ours - exact).abs().max()) < 1e-4
    assert torch.equal(model.embed.weight, weight), "the embedding that the head shares was changed"


@pytest.mark.parametrize("depth", [64, 77])
def test_a_rows_answer_does_not_depend_on_the_rows_beside_it(depth: int) -> None:
    """To the bit: so a stream goes on alike in a batch of any size, and a prompt in pieces of any length."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(depth, 100)).to(torch.bfloat16)
    linears.use_kernels(model)
    x = torch.randn(200, depth).to(torch.bfloat16)
    with torch.inference_mode():
        whole = model(x)
        for first, last in ((0, 1), (3, 8), (9, 23), (20, 57), (57, 200)):
            assert torch.equal(model(x[first:last]), whole[first:last])


def test_the_weight_of_a_packed_layer_tells_its_shape_and_spoils_what_is_computed_with_it() -> None:
    layer = PackedLinear.of(nn.Linear(8, 5).to(torch.bfloat16), wide=False)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == (
        (5, 8),
        torch.bfloat16,
        "cpu",
    )
    assert nn.functional.linear(torch.ones(1, 8, dtype=torch.bfloat16), layer.weight).isnan().all()


def test_all_packed_weights_lie_in_one_piece_one_after_the_other() -> None:
    model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 5), nn.Linear(5, 33)).to(torch.bfloat16)
    x = torch.randn(3, 8).bfloat16()
    with torch.inference_mode():
        exact = model(x)
        assert linears.use_kernels(model) == 3
        linears.gather(model)
        assert_close(model(x), exact.double())
    packed = [module.packed for module in model if isinstance(module, PackedLinear)]
    first = packed[0].data_ptr()
    assert [tensor.numel() for tensor in packed] == [512, 1280, 384]
    assert [tensor.data_ptr() - first for tensor in packed] == [0, 2 * 512, 2 * (512 + 1280)]
    assert first % (2 * 2**20) == 0


def test_a_model_without_packed_weights_has_nothing_to_gather() -> None:
    linears.gather(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_built_from_the_shape_alone_has_the_same_tensors(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(7, 33, bias=bias).to(torch.bfloat16))
    linears.use_kernels(model)
    [(name, shape)] = linears.packed_shapes(model).items()
    assert (name, shape) == ("0", PackedShape(7, 33, bias, wide=False))
    built = PackedLinear.like(shape)
    assert {n: (t.dtype, t.shape) for n, t in built.named_buffers()} == {
        n: (t.dtype, t.shape) for n, t in model[0].named_buffers()
    }


def test_a_weight_that_does_not_fit_the_input_is_refused() -> None:
    layer = PackedLinear.of(nn.Linear(8, 5).to(torch.bfloat16), wide=False)
    with pytest.raises(RuntimeError, match="packed layers: x is"):
        layer(torch.ones(2, 6, dtype=torch.bfloat16))
