"""The ladder: paging without sharing shares nothing and loses nothing, and each rung differs from the one below."""

import pytest
from loads import parameters, rows_of

from repro.engine.scheduler import PreemptionMode
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.harness import experiment
from repro.simulate.beams import Turnover
from repro.simulate.metrics import UsageSamples
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.studies import ablation_ladder as study
from repro.studies.common import deployment_of, trace_of

STEM = "ablation_ladder"


def test_each_rung_changes_one_thing():
    ladder = study.rungs()
    for below, rung in zip(ladder, ladder[1:]):
        changed = [
            name
            for name in ("batching", "preemption", "max_num_seqs", "max_num_batched_tokens")
            if getattr(below.scheduler, name) != getattr(rung.scheduler, name)
        ]
        changed += ["reservation"] if below.reservation is not rung.reservation else []
        changed += ["sharing"] if type(below) is not type(rung) and below.reservation is None else []
        # What preempts nothing has no preemption mode.
        changed = [name for name in changed if name != "preemption" or below.reservation is None]
        assert len(changed) == 1, (rung.name, changed)


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
@pytest.mark.parametrize("beams", [False, True])
def test_paging_without_sharing_shares_nothing_and_gives_everything_back(mode, beams):
    deployment = deployment_of("opt-13b", 4096)
    system = study.UnsharedSystem("unshared", "unshared", study.rungs()[3].scheduler).with_scheduler(preemption=mode)
    usage = UsageSamples(0.0, 30.0, 0.1)
    log = []
    served = serve(
        system,
        deployment,
        trace_of("alpaca", 8.0, 30.0, 0, None),
        cost_model("a100-2023", deployment),
        log=log,
        sampling=SamplingParams(n=4, use_beam_search=beams),
        observers=(usage,),
        beams=Turnover(0.3) if beams else None,
    )
    assert usage.saving == 0
    assert served.engine.scheduler.manager.num_free_blocks == served.engine.scheduler.manager.num_blocks
    assert any(event.kind == "preempt" for event in log)


def test_beams_without_sharing_are_copied_in_whole():
    manager = study.UnsharedPagedKVCacheManager(40, 4)
    group = SequenceGroup(Request(0, 0.0, 10, 5, SamplingParams(n=3, use_beam_search=True)))
    manager.allocate(group, 10)
    assert [op.src for op in manager.spread_prompt(group, 10)] == manager.block_table(group.seqs[0]) * 2
    copies = manager.fork(group, [0, 1, 1], 9)
    assert [(op.src, op.dst) for op in copies] == list(
        zip(manager.block_table(group.seqs[1]), manager.block_table(group.seqs[2]))
    )
    assert manager.blocks_at_most(group) == 3 * 4


def test_a_small_ladder_rises_to_paging_and_is_drawn():
    params = parameters(STEM, settings=["sharegpt/parallel/1"], max_seconds=120.0, precision=0.2)
    rows = rows_of(study, params)
    assert rows["crossing"]["crossing_rate"].head(4).is_monotonic_increasing
    assert set(study.draw(rows, params)) == set(experiment.parameter_file(STEM).captions)
    assert study.judge(rows, params) == []


@pytest.mark.parametrize("setting", ["sharegpt", "chat/parallel/2", "sharegpt/greedy/2", "sharegpt/parallel/-1"])
def test_settings_that_cannot_be_are_refused(setting):
    with pytest.raises(UserError, match="workload/method/sequences"):
        parameters(STEM, settings=[setting])
