"""Causal short convolutions over the sequence: one filter of a few taps for every feature, no mixing of features.

The sequence is the third axis from the end of streams, `(..., seq, streams, dim)`, and the second of `(..., seq, dim)`.
taps: (kernel, streams, dim); tap s multiplies the token s steps back; tokens before the first are zero. Expanding a
sequence into streams and reading streams into a sequence are adjoint, with time reversed.

documents: (..., seq), a number per token, if several documents are packed into one sequence: neighbouring tokens with
the same number belong to one document. A token reads only its own document, so that packing changes no result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from residua.ops.precision import promote
from residua.ops.recompute import release, save_state
from residua.ops.shapes import expect_shape
from residua.ops.transforms import Function, applied, batched, transformed


def causal_expand(x: Tensor, taps: Tensor, documents: Tensor | None = None) -> Tensor:
    """X[t, j] = sum_s taps[s, j] x[t - s]: DDL's embedding convolution (EC, arXiv 2601.00417v2).

    x: (..., seq, dim), taps: (kernel, streams, dim). Returns (..., seq, streams, dim) in the dtype of `x`; computed in
    at least float32. Raises ValueError if the widths or the axes of `documents` differ.
    """
    expect_shape("taps", taps, (*taps.shape[:2], x.shape[-1]), "(kernel, streams, dim)")
    if documents is not None:
        expect_shape("documents", documents, x.shape[:-1], "(..., seq)")
        documents = consecutive(documents)
    return applied(_CausalExpand, x, taps, documents)


def causal_read(streams: Tensor, taps: Tensor, mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
    """x[t] = sum_{s, j} taps[s, j] X[t - s, j]: DDL's token compression (TC) with the read vector folded into the taps.

    streams: (..., seq, streams, dim), taps: (kernel, streams, dim). mask: (..., seq), 0 for tokens that must not
    be read, such as padding, and 1 for the others; no masked copy of the streams is kept for the backward pass. Returns
    (..., seq, dim) in the dtype of `streams`; computed in at least float32. Raises ValueError if the streams, widths or
    the axes of mask or documents differ. arXiv 2601.00417v2 section 4.2, coefficients c_{i,j,s}.
    """
    expect_shape("taps", taps, (taps.shape[0], *streams.shape[-2:]), "(kernel, streams, dim)")
    for name, numbers in (("mask", mask), ("documents", documents)):
        if numbers is not None:
            expect_shape(name, numbers, streams.shape[:-2], "(..., seq)")
    documents = None if documents is None else consecutive(documents)
    return applied(_CausalRead, streams, taps, mask, documents)


def consecutive(documents: Tensor) -> Tensor:
    """Return the documents, (..., seq), numbered 0, 1, 2, ... along the sequence.

    Neighbouring tokens with the same number belong to one document. If a number occurs again after other numbers, a new
    document begins.
    """
    borders = documents[..., 1:] != documents[..., :-1]
    return F.pad(borders.cumsum(-1), (1, 0))[..., : documents.shape[-1]]


def causal_read_on(streams: Tensor, taps: Tensor, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Continue `causal_read` from kernel - 1 partial sums over the earlier tokens, in place of these tokens.

    P_s[t] = sum_j taps[s, j] X[t, j];   A_r[t] = P_r[t] + A_{r+1}[t-1] with A_kernel = 0, and x[t] = A_0[t].

    streams: (batch, seq, streams, dim), taps: (kernel, streams, dim), sums: (batch, 1, kernel - 1, dim), the A_r of the
    token before, or None at the start. Returns x (batch, seq, dim) in the dtype of `streams`, and the A_r of every
    token (batch, seq, kernel - 1, dim) in at least float32. The sums are exact and take 1 / streams of the memory of
    the tokens. A kernel of one tap has no sums: (batch, seq, 0, dim). Raises ValueError if the streams or widths
    differ.
    """
    kernel = taps.shape[0]
    expect_shape("taps", taps, (kernel, *streams.shape[-2:]), "(kernel, streams, dim)")
    wide_streams, wide_taps = promote(streams, taps)
    if streams.shape[1] == 1:
        after = (wide_streams.unsqueeze(-3) * wide_taps).sum(-2)
        after = after if sums is None else after + F.pad(sums, (0, 0, 0, 1))
        return after[..., 0, :].to(streams.dtype), after[..., 1:, :]
    x = _read(wide_streams, wide_taps, ahead=False)  # same bits as `causal_read`
    parts = [_read(wide_streams, wide_taps[s : s + 1], ahead=False) for s in range(1, kernel)]
    if sums is not None:
        reach = min(x.shape[1], kernel - 1)
        x = torch.cat([x[:, :reach] + sums[:, 0, :reach], x[:, reach:]], 1)
    for s in reversed(range(kernel - 2)):
        later = parts[s + 1]
        start = torch.zeros_like(later[:, :1]) if sums is None else sums[:, :, s + 1].to(later.dtype)
        parts[s] = parts[s] + torch.cat([start, later[:, :-1]], 1)
    return x.to(streams.dtype), torch.stack(parts, -2) if parts else x.new_empty(*x.shape[:2], 0, x.shape[2])


def smear(x: Tensor, scale: Tensor, gate: Tensor, documents: Tensor | None = None) -> Tensor:
    """x[t] + s sigmoid(w . u[t]) x[t-1], u = the first features of x / rms(x): nanochat's smear of the previous token.

    x: (..., seq, dim), scale: () or (1,), s. gate: (features,), w, with features <= dim. nanochat normalises its
    embeddings, so that u is a slice of x. The eps of rms is the machine epsilon, as in nanochat. Returns
    (..., seq, dim) in the dtype of `x`; computed in at least float32. Raises ValueError for other shapes.
    github.com/karpathy/nanochat, gpt.py at 92d63d4.
    """
    if documents is not None:
        expect_shape("documents", documents, x.shape[:-1], "(..., seq)")
    if scale.shape not in ((), (1,)):
        raise ValueError(f"scale must be () or (1,), got {tuple(scale.shape)}")
    if gate.dim() != 1 or gate.shape[0] > x.shape[-1]:
        raise ValueError(f"gate must be (features,) with at most {x.shape[-1]} features, got {tuple(gate.shape)}")
    wide, scale, gate = promote(x, scale, gate)
    inverse_rms = (wide.square().mean(-1) + torch.finfo(wide.dtype).eps).rsqrt()
    share = scale * torch.sigmoid((wide[..., : gate.shape[0]] * gate).sum(-1) * inverse_rms)
    before = F.pad(wide, (0, 0, 1, 0))[..., : x.shape[-2], :]
    if documents is not None:
        same = F.pad(documents[..., 1:] == documents[..., :-1], (1, 0))[..., : x.shape[-2], None]
        before = torch.where(same, before, 0)
    return torch.addcmul(wide, share.unsqueeze(-1), before).to(x.dtype)


# Gradients are explicit because autograd would keep and copy every shifted slice. Inputs are saved in their own
# dtype and widened again in the backward pass.


class _CausalExpand(Function):
    @staticmethod
    def plain(x: Tensor, taps: Tensor, documents: Tensor | None) -> Tensor:
        wide_x, wide_taps = promote(x, taps)
        return _expand(wide_x, wide_taps, documents, ahead=False).to(x.dtype)

    @staticmethod
    def forward(ctx, x: Tensor, taps: Tensor, documents: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, taps, documents)
        return _CausalExpand.plain(x, taps, documents)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, taps, documents = ctx.saved_tensors
        wide_x, wide_taps = promote(x, taps)
        grad = grad.to(wide_x.dtype)
        grad_x = grad_taps = None
        if ctx.needs_input_grad[0]:
            grad_x = _read(grad, wide_taps, documents, ahead=True).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_taps = _correlate(wide_x, grad, taps.shape[0], documents, ahead=False).to(taps.dtype)
        return grad_x, grad_taps, None


class _CausalRead(Function):
    @staticmethod
    def plain(streams: Tensor, taps: Tensor, mask: Tensor | None, documents: Tensor | None) -> Tensor:
        wide_streams, wide_taps = promote(streams, taps)
        return _read(_masked(wide_streams, mask), wide_taps, documents, ahead=False).to(streams.dtype)

    @staticmethod
    def forward(ctx, streams: Tensor, taps: Tensor, mask: Tensor | None, documents: Tensor | None) -> Tensor:
        save_state(ctx, streams, taps, mask, documents)
        return _CausalRead.plain(streams, taps, mask, documents)

    @staticmethod
    def backward(ctx, grad: Tensor):
        streams, taps, mask, documents = release(ctx)
        wide_streams, wide_taps = promote(streams, taps)
        grad = grad.to(wide_streams.dtype)
        grad_streams = grad_taps = None
        if ctx.needs_input_grad[0]:
            grad_streams = _masked(_expand(grad, wide_taps, documents, ahead=True), mask).to(streams.dtype)
        if ctx.needs_input_grad[1]:
            masked = _masked(wide_streams, mask)
            grad_taps = _correlate(grad, masked, taps.shape[0], documents, ahead=True).to(taps.dtype)
        return grad_streams, grad_taps, None, None


def _masked(streams: Tensor, mask: Tensor | None) -> Tensor:
    return streams if mask is None else _only(mask != 0, streams)


def _only(chosen: Tensor, x: Tensor) -> Tensor:
    """Return x: (..., seq, streams, dim) with zeros where `chosen`: (..., seq) is false, even in place of NaN."""
    wide = chosen[..., None, None]  # a product with 0 would keep NaN and infinity
    recorded = torch.is_grad_enabled() or torch.compiler.is_compiling() or batched(x)
    if recorded or type(x) is not Tensor or x.device.type != "cpu" or x.dtype.itemsize not in _BITS:
        return torch.where(wide, x, 0)
    bits = _BITS[x.dtype.itemsize]  # three times as fast on a CPU
    return (x.view(bits) & -wide.to(bits)).view(x.dtype)


_BITS = {4: torch.int32, 8: torch.int64}


def _exporting() -> bool:
    return getattr(torch.compiler, "is_exporting", bool)()  # since torch 2.7


def _together(documents: Tensor, steps: int) -> Tensor:
    """Return whether tokens t and t + steps belong to one document: (..., seq - steps)."""
    return documents[..., : documents.shape[-1] - steps] == documents[..., steps:]


def _shifted(x: Tensor, kernel: int, documents: Tensor | None, *, ahead: bool) -> list[Tensor]:
    """Return x[t - s], or x[t + s] with `ahead`, for each tap s: (..., seq, 1, dim), zero beyond the ends.

    All have the same length, so that a compiler fuses their uses into one loop.
    """
    length = x.shape[-2]
    padded = F.pad(x, (0, 0, 0, kernel - 1) if ahead else (0, 0, kernel - 1, 0)).unsqueeze(-2)
    shifts = [padded.narrow(-3, s if ahead else kernel - 1 - s, length) for s in range(kernel)]
    if documents is None:
        return shifts
    pads = [(0, s) if ahead else (s, 0) for s in range(min(kernel, length))]  # zeros beyond the ends
    keep = [F.pad(_together(documents, s), ends) for s, ends in enumerate(pads)]
    return list(map(_only, keep, shifts)) + shifts[length:]


def _expand(x: Tensor, taps: Tensor, documents: Tensor | None, *, ahead: bool) -> Tensor:
    """sum_s taps[s, j] x[t - s], or x[t + s] with `ahead`: (..., seq, dim) -> (..., seq, streams, dim)."""
    streams = x.unsqueeze(-2) * taps[0]
    for tap, shifted in zip(taps[1:], _shifted(x, taps.shape[0], documents, ahead=ahead)[1:]):
        streams = torch.addcmul(streams, shifted, tap) if transformed() else streams.addcmul_(shifted, tap)
    return streams


def _read(streams: Tensor, taps: Tensor, documents: Tensor | None = None, *, ahead: bool) -> Tensor:
    """sum_{s, j} taps[s, j] X[t - s, j], or X[t + s, j] with `ahead`: (..., seq, streams, dim) -> (..., seq, dim)."""
    length = streams.shape[-3]
    if transformed() or _exporting():  # neither supports in-place sums, or slices as long as the sequence
        sums = [(streams * tap).sum(-2) for tap in taps.unbind()]
        shifts = [_shifted(x, s + 1, documents, ahead=ahead)[s] for s, x in enumerate(sums)]
        return torch.stack(shifts).sum(0).squeeze(-2)
    x = streams[..., 0, :] * taps[0, 0]
    for s in range(min(taps.shape[0], length)):
        into, source = (0, s) if ahead else (s, 0)
        target, reached = x.narrow(-2, into, length - s), streams.narrow(-3, source, length - s)
        if documents is not None and s:
            reached = _only(_together(documents, s), reached)
        for j in range(s == 0, taps.shape[1]):
            # One stream at a time: a sum over streams would write all its products to memory first.
            target.addcmul_(reached[..., j, :], taps[s, j])
    return x


def _correlate(x: Tensor, streams: Tensor, kernel: int, documents: Tensor | None, *, ahead: bool) -> Tensor:
    """Return sum_t x[t - s] X[t, j], or x[t + s] with `ahead`, over tokens and sequences: (kernel, streams, dim)."""
    # All products share one buffer, because allocation takes longer than the product. Second derivatives need every
    # product, so then there is no buffer.
    products = None if torch.is_grad_enabled() or batched(x) or batched(streams) else torch.empty_like(streams)
    shifts = _shifted(x, kernel, documents, ahead=ahead)
    rows = (torch.mul(shifted, streams, out=products) for shifted in shifts)
    return torch.stack([row.reshape(-1, *row.shape[-2:]).sum(0) for row in rows])
