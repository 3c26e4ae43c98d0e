"""Process state: locks, files, loggers, and everything that cannot be saved."""

from __future__ import annotations

from tests.namespaces import Notebook

NOTEBOOKS = [
    Notebook(
        "what-cannot-be-saved",
        """
        import socket, threading, subprocess, sys, contextvars, weakref, mmap, asyncio, ctypes
        import concurrent.futures, queue, sqlite3, tempfile, selectors

        good = [1, 2]

        class Server:
            def __init__(self, sock):
                self.sock, self.data = sock, good

        server = Server(socket.socket())
        nested = {"deep": [good, (server,)]}
        gen = (i for i in range(3))
        next(gen)

        async def coro():
            pass

        co = coro()

        async def agen():
            yield 1

        ag = agen()
        thread = threading.Thread(target=print)
        timer = threading.Timer(9, print)
        local = threading.local()
        held = threading.Lock()
        held.acquire()
        heldr = threading.RLock()
        heldr.acquire()
        proc = subprocess.Popen([sys.executable, "-c", ""])
        proc.wait()
        var = contextvars.ContextVar("v")
        ref = weakref.ref(server)
        mm = mmap.mmap(-1, 10)
        mv = memoryview(bytearray(3))
        loop = asyncio.new_event_loop()
        lib = ctypes.CDLL(None)
        ptr = ctypes.pointer(ctypes.c_int(1))
        pool = concurrent.futures.ThreadPoolExecutor(1)
        sq = queue.SimpleQueue()
        db = sqlite3.connect(":memory:")
        cur = db.cursor()
        tmp = tempfile.NamedTemporaryFile()
        tmpdir = tempfile.TemporaryDirectory()
        anon = tempfile.TemporaryFile()
        sel = selectors.DefaultSelector()
        fin = weakref.finalize(server, print)
        closure = (lambda s: lambda: s)(server)
        method = server.sock.close
        try:
            1 / 0
        except ZeroDivisionError as e:
            tb = e.__traceback__
        frame = sys._getframe()
        also = {"good": good}
        """,
        """
        print(good, also["good"] is good)
        """,
        omitted=(
            "server",
            "nested",
            "gen",
            "co",
            "ag",
            "thread",
            "timer",
            "local",
            "held",
            "heldr",
            "proc",
            "var",
            "ref",
            "mm",
            "mv",
            "loop",
            "lib",
            "ptr",
            "pool",
            "sq",
            "db",
            "cur",
            "tmp",
            "tmpdir",
            "anon",
            "sel",
            "fin",
            "closure",
            "method",
            "tb",
            "frame",
        ),
    ),
    Notebook(
        "synchronisation-that-is-free",
        """
        import threading, queue, concurrent.futures, collections, weakref

        lock, rlock, event, cond = (
            threading.Lock(),
            threading.RLock(),
            threading.Event(),
            threading.Condition(),
        )
        event.set()
        sem = threading.Semaphore(3)
        sem.acquire()
        q = queue.Queue()
        q.put(1)
        q.put("two")

        class Safe:
            def __init__(self):
                self.lock, self.n = lock, 0
            def up(self):
                with self.lock:
                    self.n += 1

        safe = Safe()
        safe.up()
        done = concurrent.futures.Future()
        done.set_result(5)

        class K:
            pass

        k = K()
        wk, wv, ws = (
            weakref.WeakKeyDictionary({k: 1}),
            weakref.WeakValueDictionary(a=k),
            weakref.WeakSet([k]),
        )
        """,
        """
        safe.up()
        with rlock, cond:
            pass
        print(
            safe.n,
            safe.lock is lock,
            event.is_set(),
            sem._value,
            q.qsize(),
            q.get(),
            done.result(),
        )
        print(wk[k], wv["a"] is k, k in ws, len(ws))
        """,
    ),
    Notebook(
        "files",
        """
        from pathlib import Path
        import io, sys

        Path("r.txt").write_text("one\\ntwo\\nthree\\n")
        Path("r.bin").write_bytes(bytes(range(100)))
        r = open("r.txt")
        r.readline()
        rb = open("r.bin", "rb")
        rb.read(10)
        raw = open("r.bin", "rb", buffering=0)
        raw.read(5)
        w = open("w.txt", "w")
        w.write("begin ")
        also = w
        a = open("a.txt", "a")
        a.write("x")
        both = open("w+.bin", "w+b")
        both.write(b"abcdef")
        both.seek(2)
        with open("r.txt") as closed:
            pass
        middle = open("r.txt")
        next(middle)
        gone = open("gone.txt", "w")
        Path("gone.txt").unlink()
        crlf = open("crlf.txt", "w+", newline="")
        crlf.write("a\\r\\n")
        crlf.flush()
        mem, text = io.BytesIO(b"12345"), io.StringIO("abc")
        mem.read(2)
        text.read(1)
        err = sys.stderr
        import csv

        writer = csv.writer(w)
        """,
        """
        pos = w.tell()
        w.write("end")
        w.flush()
        w.seek(pos)
        w.truncate()
        print(
            r.readline(),
            rb.read(2),
            raw.read(2),
            also is w,
            pos,
            Path("w.txt").read_text(),
            w.mode,
        )
        print(
            both.read(2),
            closed.closed,
            closed.name,
            closed.mode,
            mem.read(),
            text.read(),
            err is sys.stderr,
        )
        print(r.name, r.encoding, type(rb).__name__, type(raw).__name__, type(both).__name__)
        """,
        omitted=("middle", "gone", "crlf", "writer"),
    ),
    Notebook(
        "loggers",
        """
        import logging, sys

        log = logging.getLogger("train")
        log.setLevel(logging.DEBUG)
        log.propagate = False
        h = logging.FileHandler("train.log")
        h.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        log.addHandler(h)
        log.info("before")
        child = logging.getLogger("train.child")
        adapter = logging.LoggerAdapter(log, {"a": 1})

        class Trainer:
            def __init__(self):
                self.log = log

        tr = Trainer()
        """,
        """
        tr.log.info("after")
        print(log is logging.getLogger("train"), log.level, log.handlers == [h], log.propagate)
        print(
            open("train.log").read().splitlines()[-1], adapter.logger is log, child.parent is log
        )
        """,
    ),
    Notebook(
        "randomness",
        """
        import random
        from random import randint, Random

        random.seed(3)
        randint(1, 9)
        own = Random(5)
        own.random()
        pick = random.choice
        """,
        """
        print(
            random.random(),
            randint(1, 1000),
            own.random(),
            pick(range(1000)),
            randint.__self__ is random._inst,
        )
        """,
    ),
    Notebook(
        "history",
        """
        1 + 1
        # %%
        kept = [5]
        kept
        # %%
        (i for i in ())
        # %%
        {"k": kept}
        """,
        """
        print(
            len(In),
            In[2:4],
            Out[1],
            Out[2] is kept,
            Out[4]["k"] is kept,
            _4 is Out[4],
            _ is Out[4],
        )
        """,
        omitted=("Out[3]",),
    ),
    Notebook(
        "shell",
        """
        ip = get_ipython()
        sh = ip.run_line_magic
        """,
        """
        print(ip is get_ipython())
        """,
    ),
    Notebook(
        "settings",
        """
        import os, sys, decimal

        os.environ["MY_KEY"] = "value"
        os.makedirs("inside", exist_ok=True)
        os.chdir("inside")
        sys.path.append("/somewhere/else")
        decimal.getcontext().prec = 5
        """,
        """
        print(os.environ["MY_KEY"], os.path.basename(os.getcwd()), decimal.Decimal(1) / 3)
        print("/somewhere/else" in sys.path)
        os.chdir("..")
        """,
    ),
    Notebook(
        "what-others-put-there",
        """
        %load_ext autoreload
        # %%
        get_ipython().push({"handy": [1]}, interactive=False)
        mine = handy
        """,
        """
        print(handy is mine, "handy" in get_ipython().user_ns_hidden)
        print("autoreload" in get_ipython().extension_manager.loaded)
        """,
    ),
]
