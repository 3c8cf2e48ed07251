"""The byte model: the figures that follow from counting tensors by hand, per feature of the width."""

import pytest

from benchmarks.roofline import TRAFFIC, Passes


def per_feature(operation: str, channels: int, *, state_bytes: int, vector_bytes: int = 2) -> tuple[float, float]:
    """Bytes for one token and one of its features, in a model so wide that single numbers do not count."""
    dim = 2**20
    return tuple(
        round(passes.bytes(dim=dim, channels=channels, state_bytes=state_bytes, vector_bytes=vector_bytes) / dim, 3)
        for passes in TRAFFIC[operation](channels)
    )


@pytest.mark.parametrize(
    ("operation", "channels", "state_bytes", "forward", "backward"),
    [
        ("residual", 1, 2, 8, 8),
        ("boundary", 1, 2, 8, 12),
        ("boundary", 1, 4, 12, 18),
        ("boundary", 4, 2, 20, 30),
        ("boundary", 4, 4, 36, 54),
        ("delta_write", 4, 2, 18, 28),
        ("delta_write", 4, 4, 34, 52),
        ("stream_read", 4, 2, 10, 18),
        ("hyper_write", 4, 2, 18, 28),
        ("hybrid", 4, 2, 16, 24),
        ("rms_norm", 4, 2, 4, 6),
    ],
)
def test_the_bytes_of_a_feature_are_counted(operation, channels, state_bytes, forward, backward):
    assert per_feature(operation, channels, state_bytes=state_bytes) == (forward, backward)


def test_a_boundary_is_cheaper_than_its_parts():
    parts = ("delta_write", "stream_read", "rms_norm")
    apart = sum(sum(per_feature(part, 4, state_bytes=2)) for part in parts)
    assert apart > 1.5 * sum(per_feature("boundary", 4, state_bytes=2))


def test_sinkhorn_moves_nothing_but_its_matrices():
    forward, backward = TRAFFIC["sinkhorn"](4)
    assert forward.bytes(dim=7, channels=4, state_bytes=2, vector_bytes=2) == 2 * 16 * 4
    assert backward.bytes(dim=7, channels=4, state_bytes=2, vector_bytes=2) == 3 * 16 * 4


def test_the_bytes_of_passes_add_up_states_vectors_and_numbers():
    assert Passes(2, 3, 5).bytes(dim=10, channels=4, state_bytes=2, vector_bytes=4) == 2 * 40 * 2 + 3 * 10 * 4 + 5 * 4
