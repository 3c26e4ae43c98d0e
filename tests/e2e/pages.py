"""The widgets of a real kernel, as in a page: their models, by comm messages only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e.kernels import SECONDS_MAX, Kernel, kernel

WIDGET = "application/vnd.jupyter.widget-view+json"


class WidgetKernel(Kernel):
    """Kernel whose widgets are observed."""

    def __init__(self, of: Kernel) -> None:
        super().__init__(of.manager, of.client)
        #: State of each model that is open, by its id.
        self.models: dict[str, dict[str, Any]] = {}
        #: What was displayed, in order.
        self.displayed: list[dict[str, Any]] = []

    def _message(self, deadline: float) -> dict[str, Any]:
        message = super()._message(deadline)
        content = message["content"]
        match message["msg_type"]:
            case "comm_open" if content["target_name"] == "jupyter.widget":
                self.models[content["comm_id"]] = dict(content["data"]["state"])
            case "comm_msg" if content["data"].get("method") == "update":
                self.models[content["comm_id"]] |= content["data"]["state"]
            case "comm_close":
                self.models.pop(content["comm_id"], None)
            case "execute_result" | "display_data":
                self.displayed.append(content["data"])
        return message

    def show(self, code: str) -> str:
        """Run a cell that shows a widget, and open a view of it; return its model's id."""
        ran = self.run(code)
        assert (ran.error, ran.stderr) == ("", "")
        model = str(self.displayed[-1][WIDGET]["model_id"])
        self.send(model, {"method": "update", "state": {"_view_count": 1}, "buffer_paths": []})
        return model

    def inside(self, model: str) -> Iterator[str]:
        """Return the ids of a model and of the models in it."""
        yield model
        for child in self.models[model].get("children", ()):
            yield from self.inside(child.removeprefix("IPY_MODEL_"))

    def text(self, model: str) -> str:
        """Return all text of a model and of the models in it."""
        found = (self.models[each] for each in self.inside(model))
        return "\n".join(each["value"] for each in found if isinstance(each.get("value"), str))

    def wait_for(self, model: str, *texts: str) -> None:
        """Wait until a widget shows all of these texts."""
        self.wait(lambda: all(each in self.text(model) for each in texts))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for messages of the kernel."""
        deadline = time.monotonic() + SECONDS_MAX
        while not condition():
            self._message(deadline)

    def button(self, model: str, name: str) -> str:
        """Wait until a button is enabled; return its id."""
        (found,) = (e for e in self.inside(model) if self.models[e].get("description") == name)
        self.wait(lambda: not self.models[found]["disabled"])
        return found

    def click(self, model: str, name: str) -> None:
        """Click a button as soon as it is enabled."""
        event = {"method": "custom", "content": {"event": "click"}}
        self.send(self.button(model, name), event)

    def toggle(self, model: str, name: str, *, on: bool) -> None:
        """Press a toggle button as soon as it is enabled."""
        state = {"method": "update", "state": {"value": on}, "buffer_paths": []}
        self.send(self.button(model, name), state)

    def send(self, comm: str, data: dict[str, Any]) -> None:
        """Send a message as a page does."""
        message = self.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        self.client.shell_channel.send(message)


@contextmanager
def page() -> Iterator[WidgetKernel]:
    """Start a kernel, and observe its widgets; end it afterwards."""
    with kernel() as found:
        yield WidgetKernel(found)
