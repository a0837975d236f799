"""The harness turns red for every planted bug. `run.py --mutants` prints the table."""

from __future__ import annotations

import pytest

from simulator.mutants import MUTANTS, Mutant, hunt

LIMIT = 1000


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    caught = hunt(mutant, LIMIT)
    assert caught is not None, f"{LIMIT} histories with '{mutant.name}', and none shows {sorted(mutant.signs)}"
