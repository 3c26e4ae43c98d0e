"""Devices and sessions as Prometheus metrics, prefix ``sing_``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from kernelproxy.common.protocol.views import DeviceView, SessionView, SharingView

_COUNTED = {
    "preemptions": "Leases that were ended so that another session could run.",
    "switches": "Leases for which memory had to be loaded onto a device.",
    "evictions": "Sessions whose memory was evicted from a device for other sessions.",
    "migrations": "Migrations of sessions to other devices.",
    "tier_violations": "Session-hours below the guaranteed share of the tier.",
}

__all__ = ["CONTENT_TYPE", "render"]


class _Collector:
    """Collector of Prometheus metrics from one status reply."""

    def __init__(
        self,
        devices: Sequence[DeviceView],
        sessions: Sequence[SessionView],
        sharing: SharingView,
    ) -> None:
        self._devices, self._sessions, self._sharing = devices, sessions, sharing

    def collect(self) -> Iterator[Metric]:
        """Called by `generate_latest`."""
        total = GaugeMetricFamily("sing_device_memory_bytes", "Device memory.", labels=["device"])
        used = GaugeMetricFamily(
            "sing_device_memory_used_bytes", "Device memory in use by sessions.", labels=["device"]
        )
        for device in self._devices:
            total.add_metric([device["id"]], device["memory_total"])
            used.add_metric([device["id"]], device["memory_used"])
        states = GaugeMetricFamily("sing_sessions", "Sessions by state.", labels=["state"])
        for state, count in sorted(Counter(s["state"] for s in self._sessions).items()):
            states.add_metric([state], count)
        jobs = GaugeMetricFamily("sing_jobs", "Jobs with more than one rank.")
        found = {(s["owner"], s["job"]) for s in self._sessions if (s["ranks"] or 1) > 1}
        jobs.add_metric([], len(found))
        yield from (total, used, states, jobs)
        yield from self._by_session()
        if self._sharing:
            yield from self._by_decision()

    def _by_session(self) -> Iterator[Metric]:
        memory = GaugeMetricFamily(
            "sing_session_memory_bytes", "Device bytes of live storages.", labels=["session"]
        )
        log = GaugeMetricFamily(
            "sing_session_log_bytes", "Bytes of log since the newest snapshot.", labels=["session"]
        )
        operators = CounterMetricFamily(
            "sing_session_operators", "Operators issued.", labels=["session"]
        )
        seconds = CounterMetricFamily(
            "sing_session_gpu_seconds",
            "Seconds for which the device executed operators.",
            labels=["session"],
        )
        for session in self._sessions:
            labels = [session["id"]]
            memory.add_metric(labels, session["memory"])
            if not session["reason"]:
                continue  # another user's session: the rest is not visible, which is not zero
            log.add_metric(labels, session["log_bytes"])
            operators.add_metric(labels, session["operators"])
            seconds.add_metric(labels, session["gpu_seconds"])
        yield from (memory, log, operators, seconds)

    def _by_decision(self) -> Iterator[Metric]:
        waits = HistogramMetricFamily(
            "sing_time_to_gpu_seconds",
            "Seconds from the first operator of a cell to its lease of a device.",
            labels=["tier"],
        )
        for tier, found in self._sharing["time_to_gpu"].items():
            classes = [
                ("+Inf" if bound is None else str(bound), count)
                for bound, count in found["classes"]
            ]
            waits.add_metric([tier], classes, found["seconds"])
        yield waits
        counts = cast("dict[str, int]", self._sharing)
        for name, text in _COUNTED.items():
            yield CounterMetricFamily(f"sing_{name}", text, value=counts[name])
        served = CounterMetricFamily(
            "sing_user_gpu_seconds",
            "Seconds for which users held devices.",
            labels=["cluster", "user"],
        )
        for cluster, users in self._sharing["served"].items():
            for user, seconds in users.items():
                served.add_metric([cluster, user], seconds)
        yield served


def render(
    devices: Sequence[DeviceView],
    sessions: Sequence[SessionView],
    sharing: SharingView,
) -> bytes:
    """Write the metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(devices, sessions, sharing))
    return generate_latest(registry)
