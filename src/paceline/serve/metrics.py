"""Metrics of a server for Prometheus: docs/monitoring has its dashboard and alerts.

Names follow Prometheus' conventions; times are those of vLLM's vocabulary: to the first token,
between two tokens, of an output token, from end to end.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest

_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
OUTCOMES = (
    "done", "refused", "busy", "cancelled", "slow_reader", "timeout", "stopping", "failed",
)  # fmt: skip
"""How a request can end."""


class Metrics:
    """What one server has done, and what it does now."""

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._now: Callable[[], Iterator[Metric]] = lambda: iter(())

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            name = f"paceline_serve_{name}_seconds"
            return Histogram(name, text, buckets=buckets, registry=self._registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_serve_{name}", text, labels, registry=self._registry)

        self._first = histogram(
            "time_to_first_token", "From the request to a text's first token.", _REQUEST_S
        )
        self._between = histogram(
            "inter_token", "Between two tokens of a text; those of one step share it.", _TOKEN_S
        )
        self.per_token = histogram(
            "time_per_output_token", "Of a text, the mean after its first token.", _TOKEN_S
        )
        self._requests_s = histogram(
            "request", "From end to end, of requests that were answered.", _REQUEST_S
        )
        self.retrieval = histogram(
            "retrieval", "From a request to its documents, where it has any.", _REQUEST_S
        )
        self._tokens_in = counter("prompt_tokens", "Of prompts whose text was begun.")
        self._cached = counter("prompt_tokens_cached", "Of these, those whose keys were there.")
        self.tokens_out = counter("generated_tokens", "That were made.")
        self._requests = counter("requests", "That ended, by how.", "outcome")
        self.swaps = counter("weight_swaps", "Times that newer weights were taken.")
        self.damaged = counter("damaged_checkpoints", "That were skipped.")
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._registry.register(self)

    def text_began(self, seconds: float, num_prompt: int, num_cached: int) -> None:
        """The first token of a text has come."""
        self._first.observe(seconds)
        self._tokens_in.inc(num_prompt)
        self._cached.inc(num_cached)

    def text_went_on(self, seconds: float, count: int) -> None:
        """So many tokens of a text have come, each after so long."""
        for _ in range(count):
            self._between.observe(seconds)

    def ended(self, outcome: str, seconds: float) -> None:
        """A request has ended, so long after it began; see OUTCOMES."""
        self._requests.labels(outcome).inc()
        if outcome == "done":
            self._requests_s.observe(seconds)

    def show(self, now: Callable[[], Iterator[Metric]]) -> None:
        """What a scrape is told besides."""
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at a scrape."""
        return self._now()

    def page(self) -> bytes:
        """What a scrape gets, in Prometheus' text format."""
        return generate_latest(self._registry)


def state(
    name: str, numbers: Mapping[str, int], step: int | None, *, is_ready: bool
) -> Iterator[Metric]:
    """What a server does at the moment of a scrape.

    Args:
        name: of the network.
        numbers: `Engine.numbers`.
        step: of the weights; None: nobody knows.
    """
    yield InfoMetricFamily("paceline_serve", "The network that is served.", {"model": name})
    gauge = GaugeMetricFamily
    yield gauge("paceline_serve_ready", "1 where requests are taken.", int(is_ready))
    if step is not None:
        yield gauge("paceline_serve_weights_step", "Training step of the weights.", step)
    yield gauge("paceline_serve_running_texts", "That are being made.", numbers["running"])
    yield gauge("paceline_serve_waiting_texts", "That wait for their turn.", numbers["waiting"])
    text = "Of keys and values: in use, kept for prompts that begin alike, empty."
    blocks = gauge("paceline_serve_blocks", text, labels=["state"])
    blocks.add_metric(["used"], numbers["blocks"] - numbers["blocks_free"])
    blocks.add_metric(["kept"], numbers["blocks_idle"])
    blocks.add_metric(["empty"], numbers["blocks_free"] - numbers["blocks_idle"])
    yield blocks
    text = "Of keys and values, that left the memory for these: kept in host memory, in files."
    tiers = gauge("paceline_serve_tier_blocks", text, labels=["tier"])
    tiers.add_metric(["host"], numbers["blocks_host"])
    tiers.add_metric(["disk"], numbers["blocks_disk"])
    yield tiers
    text = "Bytes of blocks that went to the tiers, and that came back."
    moved = CounterMetricFamily("paceline_serve_tier_bytes", text, labels=["direction"])
    moved.add_metric(["in"], numbers["tier_bytes_in"])
    moved.add_metric(["out"], numbers["tier_bytes_out"])
    yield moved
    text = "Blocks of the tiers that texts needed: fetched, computed anew as the quicker, damaged."
    wanted = CounterMetricFamily("paceline_serve_tier_reads", text, labels=["outcome"])
    for outcome in ("fetched", "recomputed", "damaged"):
        wanted.add_metric([outcome], numbers[f"blocks_{outcome}"])
    yield wanted
    text = "Times that a text gave its blocks back."
    yield CounterMetricFamily("paceline_serve_preemptions", text, numbers["preemptions"])
    text = "Tokens that were guessed, by whether they were the text's."
    guesses = CounterMetricFamily("paceline_serve_guessed_tokens", text, labels=["outcome"])
    guesses.add_metric(["right"], numbers["guessed_right"])
    guesses.add_metric(["wrong"], numbers["guessed"] - numbers["guessed_right"])
    yield guesses
