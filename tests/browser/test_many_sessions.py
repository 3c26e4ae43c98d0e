"""The panel with 200 sessions: update latency, and no requests while it is hidden."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Route

from tests.browser.conftest import TWO
from tests.browser.lab import Lab, Screen, patient
from tests.unit.fake_daemon import SESSION

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.slow]

SESSIONS, DEVICES = 200, 8
ROUNDS = 10
UPDATE_MS_MAX = 100.0

# In place of the server's stream of events: one that a test fills. `singTell` answers with how long
# it took from the first event until what it changes was painted.
FAKE_EVENTS = """
const Real = window.WebSocket;
window.WebSocket = new Proxy(Real, {
  construct(target, [url, ...rest]) {
    if (!url.includes('/api/events/subscribe')) return new target(url, ...rest);
    window.singSocket = { close() {} };
    return window.singSocket;
  }
});
window.singTell = async events => {
  const texts = events.map(event => JSON.stringify(event));
  const row = document.querySelector('.jp-Sing-session');
  const changed = new Promise(resolve => {
    const observer = new MutationObserver(() => (observer.disconnect(), resolve()));
    observer.observe(row.closest('.jp-RunningSessions-section, .jp-RunningSessions') ?? row, {
      subtree: true, childList: true, characterData: true, attributes: true
    });
  });
  const start = performance.now();
  for (const data of texts) window.singSocket.onmessage({ data });
  await changed;
  await new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)));
  return performance.now() - start;
};
"""


def session(number: int, **told: Any) -> dict[str, Any]:
    """Describe one of many."""
    device = f"cpu:{number % DEVICES}"
    names = {"id": f"s{number}", "name": f"work/{number}.ipynb", "kernel_id": f"k{number}"}
    return {**SESSION, **names, "device": device, "state": "idle", "memory": 1 << 20, **told}


def event(found: dict[str, Any]) -> dict[str, Any]:
    """Send the event with which a server reports that a session has changed."""
    kept = ("kernel_id", "state", "tier", "device", "reason", "name", "owner", "memory", "pinned")
    schema = "https://schema.jupyter.org/jupyter_sing/session/v1"
    return {"schema_id": schema, "session": found["id"], **{k: found[k] for k in kept}}


@pytest.mark.parametrize("lab", [(TWO,)], indirect=True)
def test_panel_follows_200_sessions_and_is_idle_while_hidden(lab: Lab, screen: Screen) -> None:
    sessions = [session(number) for number in range(SESSIONS)]
    devices = [
        {
            "id": f"cpu:{number}", "kind": "software", "name": "", "memory_total": 1 << 30,
            "memory_used": 0, "sessions": [], "failure": "",
        }
        for number in range(DEVICES)
    ]  # fmt: skip
    status = json.dumps({"devices": devices, "sessions": sessions, "sharing": {}})

    def answer(route: Route) -> None:
        route.fulfill(body=status, content_type="application/json")

    page = screen.page
    page.route("**/jupyter-sing/api/status*", answer)
    page.add_init_script(FAKE_EVENTS)
    screen.open()
    page.get_by_role("tab", name="Running Terminals and Kernels").click()

    patient(page.locator(".jp-Sing-session")).to_have_count(SESSIONS)

    took = []
    for turn in range(ROUNDS):
        state = ("running", "idle")[turn % 2]
        changed = [event({**each, "state": state, "memory": turn << 20}) for each in sessions]
        took.append(page.evaluate("events => singTell(events)", changed))
        word = state.capitalize()
        patient(page.locator(".jp-Sing-session", has_text=word)).to_have_count(SESSIONS)
    print(f"{SESSIONS} sessions: {', '.join(f'{each:.0f}' for each in took)} ms")
    # Other load of the machine only adds to it.
    assert min(took) < UPDATE_MS_MAX

    page.get_by_role("tab", name="File Browser").click()
    patient(page.locator(".jp-Sing-session").first).to_be_hidden()
    page.evaluate("() => new Promise(resolve => requestIdleCallback(resolve))")
    asked = len(screen.requests)
    page.evaluate(
        "events => events.forEach(each => singSocket.onmessage({ data: JSON.stringify(each) }))",
        [event({**each, "state": "idle"}) for each in sessions],
    )
    # Longer than the interval of anything that polls.
    page.wait_for_timeout(15_000)
    assert screen.requests[asked:] == []
