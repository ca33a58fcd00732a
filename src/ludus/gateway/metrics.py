"""Engine counters in Prometheus format."""

from __future__ import annotations

from ludus.gateway.service import CompletionService


def prometheus_text(service: CompletionService) -> str:
    """Return counters and gauges in text format 0.0.4."""
    stats = service.engine.stats()
    counters = {
        "requests_total": ("Choices requested.", service.num_requests),
        "passes_total": ("Forward passes.", stats.steps),
        "prefill_tokens_total": ("Tokens computed as context.", stats.prefill_tokens),
        "cached_tokens_total": ("Context tokens read from the cache.", stats.cached_tokens),
        "decode_tokens_total": ("Tokens sampled.", stats.decode_tokens),
        "recomputed_tokens_total": ("Tokens recomputed after weight updates.", stats.recomputed_tokens),
        "batch_tokens_total": ("Tokens of all passes.", stats.batch_tokens),
        "evicted_pages_total": ("Evicted cache pages.", stats.evicted_pages),
        "model_seconds_total": ("Seconds in forward passes.", stats.model_s),
        "sample_seconds_total": ("Seconds in sampling.", stats.sample_s),
        "running_sum_total": ("Running requests, summed over the passes.", stats.running_steps),
        "waiting_sum_total": ("Waiting requests, summed over the passes.", stats.queue_steps),
        "schedule_seconds_total": ("Seconds in the rest of the passes.", stats.schedule_s),
    }
    gauges = {
        "choices_under_way": ("Waiting and running choices.", service.num_under_way),
        "paused": ("1 while paused.", int(service.is_paused)),
        "weight_version": ("Version of the current weights.", service.engine.version),
    }
    lines: list[str] = []
    for kind, family in (("counter", counters), ("gauge", gauges)):
        for name, (told, value) in family.items():
            lines += [f"# HELP ludus_{name} {told}", f"# TYPE ludus_{name} {kind}", f"ludus_{name} {value}"]
    return "\n".join(lines) + "\n"
