"""Storages, and writing to files."""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
from typing import Any

import torch

from tests.surface.checking import check


@check
def storages() -> None:
    made = torch.UntypedStorage(10, device="cuda")
    assert (made.device.type, made.nbytes()) == ("cuda", 10)
    from_list = torch.UntypedStorage([1, 2, 3], device="cuda")
    assert from_list.tolist() == [1, 2, 3]
    from_list.resize_(20)
    assert from_list.nbytes() == 20
    assert from_list.tolist()[:3] == [1, 2, 3]
    assert from_list.clone().cpu().tolist()[:3] == [1, 2, 3]
    x = torch.ones(3, device="cuda")
    assert x.view(3, 1).untyped_storage().data_ptr() == x.data_ptr() != 0
    assert torch.UntypedStorage(4).device.type == "cpu"


@check
def saving_and_loading() -> None:
    model = torch.nn.Linear(3, 3).cuda()
    for new_format in (True, False):
        file = io.BytesIO()
        torch.save(model.state_dict(), file, _use_new_zipfile_serialization=new_format)
        for place, device in ((None, "cuda"), ("cpu", "cpu"), ("cuda:0", "cuda")):
            file.seek(0)
            loaded = torch.load(file, map_location=place)["weight"]
            assert loaded.device.type == device
            assert torch.equal(loaded.cpu(), model.weight.detach().cpu())
    tied = torch.ones(4, device="cuda")
    a, b = pickle.loads(pickle.dumps([tied, tied[:2]]))
    assert (a.device.type, b.tolist()) == ("cuda", [1.0, 1.0])
    assert copy.deepcopy(tied).data_ptr() != tied.data_ptr()


@check
def files_are_loaded_in_every_way() -> None:
    state: dict[str, Any] = {
        "w": torch.arange(6.0, device="cuda").reshape(2, 3),
        "n": 3,
        "c": torch.ones(2),
    }
    state["view"] = state["w"][1]
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "state.pt")
        torch.save(state, path)
        for keywords in (
            {"map_location": "cuda"},
            {"map_location": torch.device("cuda", 0)},
            {"map_location": {"cuda:0": "cpu"}},
            {"map_location": lambda storage, place: storage},
            {"map_location": lambda storage, place: storage.cuda()},
            {"mmap": True},
            {"mmap": True, "map_location": "cpu"},
            {"weights_only": False},
            {},
        ):
            found = torch.load(path, **keywords)
            assert torch.equal(found["w"].cpu(), state["w"].cpu()), keywords
            assert torch.equal(found["view"].cpu(), found["w"][1].cpu())
            assert found["view"].untyped_storage().data_ptr() == (
                found["w"].untyped_storage().data_ptr()
            )
            assert found["n"] == 3
        with torch.device("cuda"):
            assert torch.load(path)["c"].device.type == "cpu"
        meta = torch.load(path, map_location="meta")
        assert meta["w"].is_meta
