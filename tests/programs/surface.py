"""Checks of what programs expect of ``torch.cuda``, run under a device session.

Prints one JSON object for each check: its name, and the error's text or "".
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from functools import partial

import torch

CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def refused(function: Callable[[], object], kind: type[Exception] = RuntimeError) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"was not refused with {kind.__name__}")


@check
def the_first_operator_may_be_any() -> None:
    assert torch.arange(6.0, device="cuda").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@check
def there_is_one_device() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.backends.cuda.is_built()
    assert not torch.backends.cudnn.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    with torch.cuda.device(0), torch.cuda.device("cuda:0"):
        torch.cuda.set_device(0)
    assert "one device" in refused(lambda: torch.cuda.set_device(1))


@check
def properties_tell_name_and_size() -> None:
    found = torch.cuda.get_device_properties(0)
    assert found.name == torch.cuda.get_device_name()
    assert found.total_memory == torch.cuda.mem_get_info()[1] == 2 << 30
    assert torch.cuda.get_device_capability() == (found.major, found.minor) == (8, 0)
    assert torch.cuda.is_bf16_supported()
    assert found.name in repr(found)


@check
def memory_is_accounted() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20
    del held
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 4 << 20
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before
    assert torch.cuda.memory_reserved() >= before
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert "Allocated memory" in torch.cuda.memory_summary()
    assert torch.accelerator.memory_allocated() == before
    torch.cuda.empty_cache()


@check
def out_of_memory_is_torchs_and_the_retry_works() -> None:
    take = partial(torch.empty, 3 << 30, dtype=torch.uint8, device="cuda")
    assert "memory" in refused(take, torch.cuda.OutOfMemoryError)
    held = torch.ones(1 << 20, device="cuda")
    assert held.sum().item() == 1 << 20


@check
def streams_and_events() -> None:
    stream = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        begin.record()
        x = torch.ones(300, 300, device="cuda") @ torch.ones(300, 300, device="cuda")
        end.record(stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(stream)
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) > 0
    stream.synchronize()
    assert isinstance(stream, torch.Stream)
    assert isinstance(end, torch.Event)
    assert len({stream, torch.cuda.Stream()}) == 2
    assert "cuda_stream" in repr(stream)
    torch.cuda.synchronize()
    torch.accelerator.synchronize()


@check
def seeds_and_generators() -> None:
    torch.manual_seed(5)
    first = torch.rand(4, device="cuda").tolist()
    state = torch.cuda.get_rng_state()
    second = torch.rand(4, device="cuda").tolist()
    assert first != second
    torch.cuda.set_rng_state(state)
    assert torch.rand(4, device="cuda").tolist() == second
    torch.cuda.manual_seed_all(5)
    assert torch.cuda.initial_seed() == 5
    assert torch.rand(4, device="cuda").tolist() == first
    with torch.random.fork_rng():
        torch.rand(4, device="cuda")
    assert torch.rand(4, device="cuda").tolist() == second
    own = torch.Generator("cuda").manual_seed(5)
    assert torch.rand(4, generator=own, device="cuda").tolist() == first
    assert len(torch.cuda.get_rng_state_all()) == len(torch.cuda.default_generators) == 1


@check
def tensors_print_like_those_of_the_cpu() -> None:
    for tensor in (
        torch.arange(20000.0).reshape(100, 200),
        torch.rand(7, 5, 300),
        torch.rand(2, 2) > 0.5,
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.arange(5000),
        torch.randn(3000, dtype=torch.cfloat).conj(),
        torch.rand(2, 3, dtype=torch.float16),
    ):
        plain = repr(tensor).split()
        proxied = (
            repr(tensor.cuda()).replace(", device='cuda:0'", "").replace("device='cuda:0'", "")
        )
        assert "".join(proxied.split()).replace(",,", ",").replace(",)", ")") == "".join(plain)
    parameter = torch.nn.Parameter(torch.ones(2, device="cuda"))
    assert repr(parameter).startswith("Parameter containing:")


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
def legacy_tensor_types() -> None:
    made = torch.cuda.FloatTensor([1, 2])
    assert isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(made, torch.cuda.LongTensor)
    assert not isinstance(made.cpu(), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert made.type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).type(torch.cuda.HalfTensor).dtype == torch.half
    assert torch.ones(2).type("torch.cuda.FloatTensor").is_cuda


@check
def mixed_precision() -> None:
    w = torch.ones(4, 4, device="cuda", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([w], 0.1), torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = w @ w
    assert product.dtype == torch.bfloat16
    scaler.scale(product.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert w.detach().max().item() < 1


@check
def pinned_memory_and_loaders_with_workers() -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned()
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True)
    assert sum(x.cuda(non_blocking=True).sum().item() for (x,) in loader) == 190.0


@check
def addresses_are_not_given_away() -> None:
    x = torch.ones(2, device="cuda")
    assert ".cpu()" in refused(lambda: x.__dlpack__(), BufferError)
    assert ".cpu()" in refused(lambda: torch.utils.dlpack.to_dlpack(x), BufferError)
    assert not hasattr(x, "__cuda_array_interface__")
    assert torch.from_dlpack(torch.ones(2)).sum().item() == 2


@check
def what_cannot_work_says_so() -> None:
    for function in (
        torch.cuda.CUDAGraph,
        torch.cuda.memory_snapshot,
        torch.cuda.utilization,
        torch.cuda.current_blas_handle,
        lambda: torch.cuda.caching_allocator_alloc(10),
        lambda: torch.cuda.Event(interprocess=True),
        lambda: torch.cuda.ExternalStream(1234),
        lambda: torch.ones(2, device="cuda").untyped_storage()._share_cuda_(),
    ):
        assert "behind a device proxy" in refused(function), function
    assert not torch.cuda.is_current_stream_capturing()
    assert not torch.distributed.is_nccl_available()


@check
def layouts_that_are_not_supported_yet_say_so() -> None:
    x = torch.eye(3)
    y = x.cuda()
    with warnings.catch_warnings():
        # Of nested and quantized tensors themselves.
        warnings.filterwarnings("ignore", ".*(prototype|deprecated)")
        for kind, function in (
            ("sparse", lambda: x.to_sparse().cuda()),
            ("sparse", lambda: torch.empty(2, 2, layout=torch.sparse_coo, device="cuda")),
            ("sparse", lambda: torch.sparse.mm(x.to_sparse(), y)),
            ("sparse", lambda: y.to_sparse()),
            ("sparse", lambda: y.to_sparse_csr()),
            ("nested", lambda: torch.nested.nested_tensor([x, x], device="cuda") + 1),
            ("quantized", lambda: torch.quantize_per_tensor(y, 0.1, 0, torch.qint8)),
            ("quantized", lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).cuda()),
        ):
            text = refused(function, NotImplementedError)
            assert kind in text, text
            assert "not supported on a proxied device yet; keep them on the CPU" in text, text
    assert y.sum().item() == 3


@check
def markers_and_profilers_do_no_harm() -> None:
    with torch.cuda.nvtx.range("outer"), torch.cuda.profiler.profile():
        torch.cuda.nvtx.mark("here")
    with torch.profiler.profile() as profile:
        torch.ones(2, device="cuda").add(1)
    assert profile.key_averages()


@check
def a_forked_child_raises_what_cuda_raises() -> None:
    x = torch.ones(1, device="cuda")
    for use in (lambda: x + 1, lambda: torch.ones(1, device="cuda"), torch.cuda.synchronize):
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                use()
                os.write(send, b"nothing was raised")
            except RuntimeError as error:
                os.write(send, str(error).encode())
            os._exit(0)
        os.close(send)
        os.waitpid(child, 0)
        text = os.read(receive, 1000).decode()
        os.close(receive)
        assert text.startswith("Cannot re-initialize CUDA in forked subprocess"), text
    assert (x + 1).item() == 2


@check
def the_default_device_can_be_the_device() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).is_cuda
    finally:
        torch.set_default_device(None)


def main() -> None:
    # The programs of users do not treat warnings as errors; ours must not cause any.
    warnings.simplefilter("error", UserWarning)
    for function in CHECKS:
        error = ""
        try:
            function()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": function.__name__, "error": error}))


if __name__ == "__main__":
    main()
