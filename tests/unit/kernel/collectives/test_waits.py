"""The reports of a rank that waits for its peers: others have the device meanwhile."""

from __future__ import annotations

from kernelproxy.kernel.collectives.transport.waits import BackgroundThread, Waiting, Waits


def in_background(task: object) -> None:
    """Execute a task as an asynchronous collective is executed."""
    assert callable(task)
    thread = BackgroundThread(target=task)
    thread.start()
    thread.join()


def wait_for_peers(waits: Waits) -> None:
    with waits.for_peers():
        pass


def test_a_program_that_waits_for_peers_is_reported() -> None:
    found = list[Waiting]()
    waits = Waits(found.append)
    with waits.for_peers(), waits.for_peers():
        pass
    assert found == [Waiting.program, Waiting.none]


def test_a_collective_waits_in_the_background_until_the_program_waits_for_it() -> None:
    found = list[Waiting]()
    waits = Waits(found.append)

    def collective() -> None:
        with waits.for_peers():
            with waits.for_collectives():
                assert found == [Waiting.background, Waiting.program]
            assert found[-1] == Waiting.background

    with waits.for_collectives():
        assert found == []
    in_background(collective)
    assert found[-1] == Waiting.none


def test_the_end_of_a_backward_pass_waits_for_all_collectives() -> None:
    found = list[Waiting]()
    waits = Waits(found.append)
    waits.begin()
    waits.begin()

    def first() -> None:
        with waits.for_peers():
            waits.end_backward()
            assert found == [Waiting.background, Waiting.program]
        waits.complete()

    def second() -> None:
        with waits.for_peers():
            assert found[-1] == Waiting.program
        waits.complete()

    in_background(first)
    in_background(second)
    waits.begin()
    found.clear()
    in_background(lambda: wait_for_peers(waits))
    assert found == [Waiting.background, Waiting.none]


def test_a_backward_pass_without_collectives_waits_for_nothing() -> None:
    found = list[Waiting]()
    waits = Waits(found.append)
    waits.end_backward()
    waits.begin()
    in_background(lambda: wait_for_peers(waits))
    assert found == [Waiting.background, Waiting.none]
