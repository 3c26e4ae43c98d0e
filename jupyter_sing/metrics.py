"""Devices and sessions as Prometheus metrics, prefix ``sing_``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "render"]


class _Collector:
    """What Prometheus collects from one answer of the daemon."""

    def __init__(
        self, devices: Sequence[dict[str, Any]], sessions: Sequence[dict[str, Any]]
    ) -> None:
        self._devices, self._sessions = devices, sessions

    def collect(self) -> Iterator[Metric]:
        """Called by `generate_latest`."""
        total = GaugeMetricFamily("sing_device_memory_bytes", "Device memory.", labels=["device"])
        used = GaugeMetricFamily(
            "sing_device_memory_used_bytes", "Device memory that sessions use.", labels=["device"]
        )
        for device in self._devices:
            total.add_metric([device["id"]], device["memory_total"])
            used.add_metric([device["id"]], device["memory_used"])
        states = GaugeMetricFamily("sing_sessions", "Sessions by state.", labels=["state"])
        for state, count in sorted(Counter(s["state"] for s in self._sessions).items()):
            states.add_metric([state], count)
        yield from (total, used, states)
        yield from self._by_session()

    def _by_session(self) -> Iterator[Metric]:
        memory = GaugeMetricFamily(
            "sing_session_memory_bytes", "Device bytes of live storages.", labels=["session"]
        )
        log = GaugeMetricFamily(
            "sing_session_log_bytes", "Log kept since the newest snapshot.", labels=["session"]
        )
        operators = CounterMetricFamily(
            "sing_session_operators", "Operators that were issued.", labels=["session"]
        )
        seconds = CounterMetricFamily(
            "sing_session_gpu_seconds", "Time that the device executed.", labels=["session"]
        )
        for session in self._sessions:
            labels = [session["id"]]
            memory.add_metric(labels, session["memory"])
            log.add_metric(labels, session["log_bytes"])
            operators.add_metric(labels, session["operators"])
            seconds.add_metric(labels, session["gpu_seconds"])
        yield from (memory, log, operators, seconds)


def render(devices: Sequence[dict[str, Any]], sessions: Sequence[dict[str, Any]]) -> bytes:
    """Write the metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(devices, sessions))
    return generate_latest(registry)
