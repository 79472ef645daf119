"""Where a tensor's bytes are, for Rust, and what has no such place."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import polder  # noqa: E402
from polder import _core, address, errors  # noqa: E402


def freed() -> Any:
    """A view of a storage that FSDP, for one, has given back."""
    whole = torch.ones(100_000)
    view = whole[50_000:]
    whole.untyped_storage().resize_(0)
    return view


class Around(torch.Tensor):
    """Has tensors inside it, as a DTensor has."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def shortened(view: Any = slice(None)) -> Any:
    """A view of a tensor of which 64 bytes are left: behind them lies the memory of others."""
    whole = torch.ones(4, 100)
    part = whole[view]
    whole.untyped_storage().resize_(64)
    return part


def test_a_plain_tensor_has_the_address_of_its_bytes_and_an_empty_one_needs_none() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert address.of(whole[1:], dtype=torch.float32, count=8) == whole.data_ptr() + 16
    assert address.of(torch.empty(0)) == 0
    # A stride of a dimension with one element says nothing.
    assert address.of(whole[:, :1].t()[:, :1]) == whole.data_ptr()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: torch.ones(4, 3).t(), r"shape \[3, 4\] with strides \[1, 3\]; call .contiguous\(\)"),
        (lambda: torch.ones(3).expand(2, 3), r"shape \[2, 3\] with strides \[0, 1\]"),
        (lambda: torch._neg_view(torch.ones(3)), r"lazy negative; call .resolve_neg\(\)"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), r"lazy conjugate; call .resolve_conj\(\)"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "lazy negative"),
        (lambda: torch.eye(3).to_sparse(), r"layout torch.sparse_coo; call .to_dense\(\)"),
        (lambda: torch.ones(3, device="meta"), r"on meta; call .cpu\(\)"),
        (lambda: torch._efficientzerotensor(4), "of 4 elements that has no memory"),
        (
            lambda: torch.Tensor._make_wrapper_subclass(Around, (4,)),
            r"Around of 4 elements that has no memory for them; give the tensor inside it, as to_local\(\)",
        ),
        (freed, "of 50000 elements that has no memory"),
        (shortened, "of 400 elements that has no memory for them"),
        (lambda: shortened(slice(3, 4)), "of 100 elements that has no memory for them"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), r"nested tensor; give its values\(\)"),
    ],
)
def test_what_is_not_its_bytes_is_refused_with_a_remedy(made: Callable[[], Any], said: str) -> None:
    tensor = made()
    with pytest.raises(errors.ArgumentError, match=f"^push got a .*{said}"):
        address.of(tensor, what="push")


def test_another_type_or_size_than_rust_takes_it_for_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match=r"elements of torch.float64 where torch.float32 belong"):
        address.of(torch.ones(3, dtype=torch.float64), dtype=torch.float32)
    with pytest.raises(errors.ArgumentError, match="3 elements where 4 belong"):
        address.of(torch.ones(3), count=4)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_only_a_tensor_that_is_written_gets_a_new_version(mode: Any) -> None:
    tensor = torch.ones(3, requires_grad=True)
    with mode():
        address.of(tensor)
        assert tensor._version == 0
        address.of(tensor, writable=True)
    assert tensor._version == 1
    with torch.inference_mode():
        unversioned = torch.ones(3)
    assert address.of(unversioned, writable=True) == unversioned.data_ptr()


class Elsewhere(torch.Tensor):
    """Says of itself what its bytes do not."""

    is_cpu = False


def test_a_collective_starts_on_tensors_that_are_their_bytes_and_on_no_others(pool: polder.Pool) -> None:
    plain = [
        torch.ones(4, 3),
        torch.ones(4, 3)[1:, :],
        torch.ones(3, 1)[:, :1].t()[:, :1],
        torch.tensor(1.0),
        torch.empty(0),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).as_subclass(type("Named", (torch.Tensor,), {})),
    ]
    others = [
        torch.ones(4, 3).t(),
        torch.ones(3).expand(2, 3),
        torch._neg_view(torch.ones(3)),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.eye(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(3).as_subclass(Elsewhere),
    ]
    operation = _core.Operation("broadcast", "broadcast", "uint8")
    with polder.Group(pool, "/one", 0, 1) as group:
        for tensor in plain:
            before = tensor._version
            assert group.start(operation, [tensor], [], None, False) is None
            assert tensor._version == before
            assert group.start(operation, [], [tensor], None, False) is None
            assert tensor._version == before + 1
        for tensor in others:
            before = tensor._version
            assert group.start(operation, [], [tensor], None, False) is NotImplemented
            assert tensor._version == before
        group.start(operation, [], [shortened((0, slice(16)))], None, False)
        for made in (freed, lambda: torch._efficientzerotensor(4), shortened, lambda: shortened((0, slice(15, 17)))):
            with pytest.raises(
                errors.ArgumentError, match=r"^broadcast got a Tensor of .* elements that has no memory"
            ):
                group.start(operation, [], [made()], None, False)
