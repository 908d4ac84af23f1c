"""What decides between layouts, choices for a Job, and budgets (pure)."""

import pytest

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, ClusterSpec, device
from paceline.config.job import Job, JobSpec, read_job
from paceline.config.model import Model
from paceline.config.prices import Prices
from paceline.config.stack import Stack
from paceline.plan.points import Setting
from paceline.plan.price.step import predict
from paceline.plan.resolve import concrete_cluster, resolve
from paceline.plan.search import why
from paceline.plan.search.budget import plan_purchase
from paceline.plan.search.choose import plan_job
from paceline.plan.search.search import search
from paceline.plan.search.space import SearchConstraints

SEVEN = Model(
    vocab_size=32000, hidden_size=4096, ffn_size=11008, num_layers=32, num_heads=32,
    max_seq_len=4096,
)  # fmt: skip
WISHES = SearchConstraints(bounds={"cp": (1, 2), "pp": (1, 4), "stages_per_rank": (1, 2)})
SHAPES = (
    "model.hidden_size=2048", "model.ffn_size=8192", "model.num_layers=24", "model.num_heads=16",
    "model.num_kv_heads=8", "model.max_seq_len=4096", "train.seq_len=4096",
)  # fmt: skip


def _cluster(name="A100-80", nodes=2) -> Cluster:
    return Cluster(device=device(name), devices_per_node=8, num_nodes=nodes)


def _setting(model=SEVEN, name="A100-80", nodes=2, batch=64) -> Setting:
    return Setting(model, _cluster(name, nodes), 4096, batch, Stack())


@pytest.fixture(scope="module")
def found():
    return search(_setting(), WISHES, num=30)


def test_the_margin_is_the_sum_of_its_terms(found):
    margin = why.margin(found)
    best = found.ranked[0]
    assert margin.slower_by >= 0
    lost = sum(margin.loses_s.values())
    assert lost == pytest.approx(margin.slower_by * best.step_s, rel=1e-6, abs=1e-9)
    assert why.name_of(margin.runner_up) != why.name_of(best.layout)
    assert margin.text.startswith(why.name_of(margin.runner_up))


def test_the_binding_term_is_the_largest_without_progress(found):
    best = found.ranked[0]
    binding = why.binding(best)
    assert binding.term not in ("matmul", "attention")
    waste = {term: s for term, s in best.time_s.items() if term not in ("matmul", "attention")}
    assert waste[binding.term] == max(waste.values())
    assert binding.share == pytest.approx(waste[binding.term] / best.step_s)


def test_flips_go_the_way_that_physics_goes(found):
    sensitivities = {flip.change: flip for flip in why.sensitivities(found)}
    assert {"a quarter more memory", "twice the batch"} < set(sensitivities)
    faster = [flip for change, flip in sensitivities.items() if "twice as fast" in change]
    slower = [flip for change, flip in sensitivities.items() if "half as fast" in change]
    assert faster
    assert slower
    assert all(flip.gain >= -1e-9 for flip in faster)
    assert all(flip.gain <= 1e-3 for flip in slower)
    assert sensitivities["a quarter more memory"].gain >= 0
    for flip in sensitivities.values():
        assert flip.is_other == (flip.best != found.ranked[0].layout)
        assert flip.change in flip.text


def test_a_slow_network_changes_the_choice():
    """Parameters gathered over a network of a hundredth cost more than what they save."""
    cluster = _cluster()
    network = why.tiers_of(cluster)
    slow = (*network[:-1], why._scaled(network[-1], 0.01))
    setting = Setting(SEVEN, cluster.replace(tiers=slow), 4096, 64, Stack())
    then = search(setting, WISHES, num=30).ranked[0]
    now = search(_setting(), WISHES, num=30).ranked[0]
    assert then.step_s > now.step_s
    assert then.layout != now.layout


def test_more_bandwidth_leaves_latency_and_less_takes_its_time():
    tier = why.tiers_of(_cluster())[0]
    for op, curves in why._scaled(tier, 2.0).collectives.items():
        for curve, old in zip(curves, tier.collectives[op], strict=True):
            assert curve.seconds[0] == old.seconds[0]
            assert all(a <= b for a, b in zip(curve.seconds, old.seconds, strict=True))


def test_what_cannot_fit_says_what_lacks_and_what_helps():
    found = search(_setting(SEVEN.replace(num_layers=160), "A100-40", nodes=1, batch=8), num=5)
    assert not found.ranked
    lack = why.shortage(found)
    assert lack.lacks_bytes > 0
    assert lack.lacks_bytes == lack.nearest.needed_bytes - found.limit_bytes
    terms = lack.nearest.heaviest.terms
    assert terms[lack.term] == max(terms.values())
    assert lack.change is not None
    assert why.explain(found) == (lack.text,)
    assert lack.change in lack.text


def test_where_no_change_helps_it_says_so():
    vast = SEVEN.replace(num_layers=1000, hidden_size=65536, ffn_size=262144, num_heads=256,
                         num_kv_heads=256)  # fmt: skip
    lack = why.shortage(search(_setting(vast, "A100-40", nodes=1, batch=8), num=5))
    assert lack.change is None
    assert "no change that was tried fits" in lack.text


# ---- a Job ---------------------------------------------------------------------------------------


def _job(*overrides: str) -> JobSpec:
    return read_job(None, (*SHAPES, "train.global_batch=64", *overrides))


def test_a_job_becomes_concrete_with_a_reason_for_each_choice():
    job = _job()
    plan = plan_job(job, _cluster(nodes=1))
    assert isinstance(plan.job, Job)
    autos = {f"layout.{key}" for key in job.layout.undecided}
    assert autos <= set(plan.reasons)
    assert plan.job.layout.num_ranks == 8
    assert plan.job.layout.offload == ()
    assert plan_job(plan.job, _cluster(nodes=1)).job == plan.job


def test_what_is_fixed_stays():
    job = _job("layout.tp=2", "layout.recompute=full", "layout.micro_batch=2")
    layout = plan_job(job, _cluster(nodes=1)).job.layout
    assert (layout.tp, layout.recompute, layout.micro_batch) == (2, "full", 2)


def test_the_search_is_never_slower_than_the_simple_rules():
    job, cluster = _job(), _cluster(nodes=1)
    plan = plan_job(job, cluster)
    simple = resolve(job, cluster).job
    simple_s = predict(Setting.of(simple), simple.layout).step_s
    assert plan.ranked[0].layout == plan.job.layout
    assert plan.ranked[0].step_s <= 1.001 * simple_s


def test_a_concrete_job_is_predicted_as_it_stands():
    job = resolve(_job(), _cluster(nodes=1)).job
    plan = plan_job(job, _cluster(nodes=1))
    assert [one.layout for one in plan.ranked] == [job.layout]


def test_rules_decide_where_nothing_is_known():
    unknown = Cluster(
        device=device("A100-80").replace(name="a new chip", peak_flops={}),
        devices_per_node=2, num_nodes=1,
    )  # fmt: skip
    plan = plan_job(_job(), unknown)
    assert plan.ranked == ()
    assert isinstance(plan.job, Job)
    assert plan.notes[0].startswith("simple rules decided")


def test_what_fits_nowhere_is_refused_with_what_would_help():
    job = _job("model.num_layers=400", "model.hidden_size=8192", "model.ffn_size=32768")
    with pytest.raises(InputError, match=r"nothing fits: .* lacks .* GB a device"):
        plan_job(job, _cluster("A100-40", nodes=1))


def test_a_job_s_cluster_takes_what_it_lacks_from_the_machine():
    machine = _cluster(nodes=1)
    machine = machine.replace(tiers=why.tiers_of(machine))
    cluster, reasons = concrete_cluster(ClusterSpec(num_nodes=4), machine)
    assert (cluster.num_nodes, cluster.devices_per_node) == (4, 8)
    assert cluster.tiers == machine.tiers
    assert set(reasons) == {"cluster.device", "cluster.devices_per_node"}
    other, _ = concrete_cluster(ClusterSpec(device=device("H100-SXM")), machine)
    assert other.tiers == ()


# ---- money ---------------------------------------------------------------------------------------


def _offer(name: str, usd: float, nodes: int) -> Cluster:
    return _cluster(name, nodes).replace(prices=Prices(usd_per_device_hour=usd))


def test_money_and_time_buy_devices():
    offers = [_offer("A100-80", 1.5, 4), _offer("H100-SXM", 3.0, 4)]
    bought = plan_purchase(
        _setting(), offers, 5e9, usd=3000, days=3, constraints=WISHES, num_nodes=(1, 4)
    )
    assert len(bought.runs) == 4
    assert bought.fastest.usd <= 3000
    assert bought.cheapest.days <= 3
    for run in bought.runs:
        steps = 5e9 / (64 * 4096)
        price = run.cluster.prices.usd_per_device_hour.value
        hours = steps * run.best.step_s / 3600 / run.goodput
        assert run.days == pytest.approx(hours / 24)
        assert run.usd == pytest.approx(hours * run.num_devices * price)
        assert run.days >= bought.runs[0].days
    assert "within 3,000 USD and 3 days: the fastest is" in bought.text


def test_too_little_money_is_said():
    bought = plan_purchase(
        _setting(), [_offer("A100-80", 1.5, 1)], 1e12, usd=1, days=1, constraints=WISHES
    )
    assert bought.fastest is None
    assert bought.text == "no run stays within 1 USD and 1 days."


def test_a_price_is_never_invented():
    with pytest.raises(InputError, match=r"the price of A100-80 is not known"):
        plan_purchase(_setting(), [_cluster()], 1e9, usd=1000)
    with pytest.raises(InputError, match="give the number of tokens"):
        plan_purchase(_setting(), [_offer("A100-80", 1.5, 1)], 0, usd=1000)
