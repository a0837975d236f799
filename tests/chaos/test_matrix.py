"""Twenty ways to die: after each, every message is accounted for by a ledger that the dead never touched."""

from __future__ import annotations

import pytest

from chaos.check import explain
from chaos.matrix import ACTIONS, QUICK, RARE, Case, full, row, run, storm
from chaos.plan import Fault
from chaos.pytest_plugin import ROW
from chaos.run import Result
from redrive.faults import POINTS


def complaint(case: Case, result: Result) -> str:
    unreached = [f"point not reached: {one}" for one in result.unreached]
    return "\n".join([*unreached, explain(result.verdict), f"again: {case.command}"])


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_nothing_is_lost_however_a_process_dies(case: Case, record_property: pytest.RecordProperty) -> None:
    result = run(case)
    record_property(ROW, row(case, result))
    assert result.ok, complaint(case, result)
    assert result.verdict.kills >= 1


def test_a_planted_bug_that_settles_before_filing_is_caught() -> None:
    """Harmless for as long as nobody dies; then a message is gone."""
    result = run(Case(0, (Fault("office.before_file", "kill", 1),)), bug="settle_before_filing")
    assert "lost" in result.verdict.kinds, explain(result.verdict)


def test_a_planted_bug_that_acknowledges_without_filing_is_caught() -> None:
    result = run(Case(0, ()), bug="ack_without_filing")
    assert "lost" in result.verdict.kinds, explain(result.verdict)


def test_a_fault_that_is_never_reached_fails_its_run() -> None:
    result = run(Case(0, (Fault("office.after_blob", "kill", 99),)))
    assert result.verdict.ok, explain(result.verdict)
    assert result.unreached == ("worker-1: office.after_blob:99:kill",)
    assert not result.ok


def test_the_matrix_has_every_point_and_every_way_to_die() -> None:
    assert len(QUICK) == 20
    assert {fault.point for case in QUICK for fault in case.faults} == set(POINTS)
    assert {fault.action for case in QUICK for fault in case.faults} == set(ACTIONS)
    assert {(fault.point, fault.action) for case in full() for fault in case.faults} == {
        (point, action) for point in POINTS for action in ACTIONS
    }
    assert set(POINTS) >= RARE


def test_a_seed_draws_the_same_storm_again() -> None:
    assert [storm(seed) for seed in range(50)] == [storm(seed) for seed in range(50)]
    assert storm(7).command == "python -m chaos --seed 7" + "".join(f" --fault {fault}" for fault in storm(7).faults)
    assert all(Fault.read(str(fault)) == fault for seed in range(50) for fault in storm(seed).faults)
