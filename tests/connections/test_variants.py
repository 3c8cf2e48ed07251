"""The shared tests try every choice of every option."""

import pytest

from residua import DeltaAttentionResiduals, Scheme, SiameseNorm
from residua.connections import SCHEMES
from residua.errors import types_of
from support.variants import ALL, KERNELS, NON_CAUSAL, choices, derived

TRIED = [*ALL.values(), *KERNELS.values(), *NON_CAUSAL.values()]
DECLARING = {
    base for kind in SCHEMES.values() for base in kind.__mro__ if issubclass(base, Scheme) and base is not Scheme
}


@pytest.mark.parametrize("kind", sorted(DECLARING, key=lambda kind: kind.__name__))
def test_every_choice_of_an_option_occurs_in_a_preset_or_a_variant(kind):
    """Of an option that several classes inherit it is enough in one of them."""
    tried = [scheme for scheme in TRIED if isinstance(scheme, kind)]
    for option in kind.__annotations__.keys() & kind.__dataclass_fields__.keys():
        for choice in choices(types_of(kind)[option]):
            a_number = type(choice) is int  # one of many
            assert a_number or any(getattr(scheme, option) == choice for scheme in tried), (option, choice)


@pytest.mark.parametrize("kind", [SiameseNorm, DeltaAttentionResiduals])
def test_variants_of_a_new_scheme_try_every_choice(kind):
    made = derived("new", kind).values()
    for option in kind.__annotations__:
        assert {getattr(scheme, option) for scheme in [kind(), *made]} >= set(choices(types_of(kind)[option]))
