"""The choice between a plain definition and its Triton kernel: explicit, and an error where it cannot be had."""

import pkgutil
import subprocess
import sys

import pytest
import torch

from residua.errors import InputError, installing
from residua.ops import dispatch, hyper_mix, hyper_read, hyper_write, sinkhorn
from residua.ops.dispatch import choose

STATE = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
Y, WEIGHTS = STATE[:, :, 0], STATE[..., 0]
OPS = {  # the op, its arguments, and its kernel
    "hyper_read": (hyper_read, (STATE, WEIGHTS), "streams.hyper_read"),
    "hyper_mix": (hyper_mix, (STATE, STATE[..., :4]), "streams.hyper_write"),
    "hyper_write": (hyper_write, (STATE, Y, None, WEIGHTS), "streams.hyper_write"),
    "sinkhorn": (sinkhorn, (STATE[..., :4],), "sinkhorn.sinkhorn"),
}


@pytest.mark.parametrize("name", OPS)
def test_the_public_op_runs_its_kernel_on_request(name, monkeypatch):
    pytest.importorskip("triton")
    op, arguments, place = OPS[name]
    calls = []
    kernel = pkgutil.resolve_name(f"residua.ops.kernels.{place}")
    monkeypatch.setattr(f"residua.ops.kernels.{place}", lambda *args: calls.append(name) or kernel(*args))
    expected = op(*arguments)
    for implementation in ("reference", "auto"):  # "auto" takes no kernel on the CPU
        for a, b in zip(op(*arguments, implementation=implementation), expected):
            assert torch.equal(a, b)
    assert calls == []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moved = [None if x is None else x.to(device) for x in arguments]
    for a, b in zip(op(*moved, implementation="triton"), expected):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)
    assert calls == [name]


@pytest.mark.parametrize("name", OPS)
def test_an_unknown_implementation_is_an_error(name):
    op, arguments, _ = OPS[name]
    with pytest.raises(ValueError, match="must be one of auto, reference, triton, got 'cuda'"):
        op(*arguments, implementation="cuda")


class OnGPU:
    """What `choose` asks of a tensor, answered as a tensor on a GPU would."""

    is_cuda, is_meta = True, False
    device = torch.device("cuda")

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.dtype = shape, dtype


def test_auto_uses_kernels_if_they_can_run(monkeypatch):
    launch = pytest.importorskip("residua.ops.kernels.launch", exc_type=ModuleNotFoundError)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert choose("auto", OnGPU(1, 2, 4, 8), OnGPU(1, 2), None) == "triton"
    assert choose("auto", OnGPU(1, 2, 17, 8), OnGPU(1, 2)) == "reference"
    assert choose("auto", OnGPU(1, 2, 0, 8), OnGPU(1, 2)) == "reference"
    assert choose("auto", OnGPU(1, 2, 4, 8), OnGPU(1, 2, dtype=torch.float64)) == "reference"
    assert choose("auto", OnGPU(1, 2, 4, 8), STATE) == "reference"
    assert choose("reference", OnGPU(1, 2, 4, 8)) == "reference"
    assert choose("triton", STATE.to("meta")) == "reference", "no numbers, and no kernel"
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert choose("auto", OnGPU(1, 2, 4, 8)) == "reference"
    monkeypatch.setattr(dispatch, "_INSTALLED", False)
    assert choose("auto", OnGPU(1, 2, 4, 8)) == "reference"


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ([OnGPU(2, 4, 8), STATE], InputError, "tensors that are not on a CUDA device, got 'triton' and one on cpu"),
        ([OnGPU(2, 0, 8)], ValueError, "0 or more than 16 streams, got 'triton' and 0"),
        ([OnGPU(2, 17, 8)], ValueError, "0 or more than 16 streams, got 'triton' and 17"),
        ([OnGPU(2, 4, 8), OnGPU(2, 8, dtype=torch.float64)], TypeError, "dtypes except .*, got 'triton' and torch"),
    ],
)
def test_tensors_that_no_kernel_accepts_are_an_error(tensors, error, words, monkeypatch):
    launch = pytest.importorskip("residua.ops.kernels.launch", exc_type=ModuleNotFoundError)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(error, match=f"must be 'auto' or 'reference' for {words}"):
        choose("triton", *tensors)


@pytest.mark.nightly
@pytest.mark.processes
def test_the_error_for_a_missing_triton_says_how_to_install_it():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\nfrom residua.ops.dispatch import choose\n"
        "try:\n    choose('triton', torch.zeros(1, 2, 3))\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert installing("kernels") in result.stdout
