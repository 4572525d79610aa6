"""The proof of a plan: removed equals zeroed."""

from __future__ import annotations

import networks
from networks import build, image
from pruned import planned

from compresskit.prune import Plan, prove


def test_a_wrong_plan_fails_the_proof() -> None:
    """The proof is no formality: a plan that cuts one channel here and another there is refused."""
    model = build(networks.Chain)
    plan = planned(model)
    gone = plan.remove["b.0.weight"][1]
    other = tuple(sorted(set(range(16)) - set(gone)))[: len(gone)]
    wrong = dict(plan.remove) | {"b.0.weight": {**plan.remove["b.0.weight"], 1: other}}
    bad = Plan(remove=wrong, sizes=plan.sizes, lines=(), macs=1, macs_before=2)
    assert prove(model, plan, image(2)) is None
    # Zeroing the same wrong places on both sides agrees only where nothing else depends on them.
    del bad.remove["a.0.weight"]
    assert "does not run" in prove(model, bad, image(2))
