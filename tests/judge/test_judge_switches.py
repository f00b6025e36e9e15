"""Each thing that is switched off in a server changes the verdicts on its own claims and no other, over five seeds.

Servers and clients are the product's; time is virtual (`virtual.py`), so that a busy machine changes nothing. Pools,
blocks, budgets and the noise of iterations differ by seed."""

from __future__ import annotations

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=WHY)

from switched import JUDGED, SWITCHED
from virtual import virtual

from repro.judge.claims import CLAIMS
from repro.judge.suite import PROBES

pytestmark = pytest.mark.heavy(40)

SEEDS = range(5)


@pytest.mark.parametrize("off", SWITCHED)
def test_a_switch_flips_its_own_claims_and_no_other(off, monkeypatch):
    make, its_own = SWITCHED[off]
    for seed in SEEDS:
        with virtual(monkeypatch, lambda seed=seed: make(seed)) as server:
            verdicts = {claim: one.verdict for claim, one in server.findings(seed).items()}
            assert (server.backend.feed.engine.scheduler.num_preemptions > 0) is (off != "preemption")
        expected = {claim: "does not hold" if claim in its_own else "holds" for claim in JUDGED}
        assert verdicts == expected | {"throughput": "reported"}, seed


def test_the_switches_cover_every_claim():
    assert set().union(*(its_own for _, its_own in SWITCHED.values())) == set(JUDGED)
    assert set(PROBES) == set(CLAIMS)


def test_equal_seeds_give_equal_rows(monkeypatch):
    rows = []
    for _ in range(2):
        with virtual(monkeypatch, lambda: SWITCHED["nothing"][0](3)) as server:
            rows.append(server.findings(3))
    assert rows[0] == rows[1] and len(rows[0]) == len(PROBES)
