"""Other libraries: machine learning, plotting, progress bars, widgets, databases, the web."""

from __future__ import annotations

from tests.namespaces import Notebook

NOTEBOOKS = [
    Notebook(
        "sklearn",
        """
        import numpy as np
        from sklearn.linear_model import LogisticRegression
        from sklearn.ensemble import RandomForestClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler, FunctionTransformer
        from sklearn.model_selection import GridSearchCV, KFold
        from sklearn.base import BaseEstimator, ClassifierMixin

        rng = np.random.RandomState(0)
        X = rng.rand(60, 3)
        y = (X[:, 0] > 0.5).astype(int)
        clf = make_pipeline(
            StandardScaler(), FunctionTransformer(lambda a: a * 2), LogisticRegression()
        ).fit(X, y)
        forest = RandomForestClassifier(3, random_state=rng).fit(X, y)
        grid = GridSearchCV(LogisticRegression(), {"C": [1, 2]}, cv=2).fit(X, y)

        class Mine(ClassifierMixin, BaseEstimator):
            def __init__(self, k=1):
                self.k = k
            def fit(self, X, y):
                self.mean_ = y.mean()
                return self
            def predict(self, X):
                return np.full(len(X), self.mean_ > 0.5)

        mine = Mine(3).fit(X, y)
        folds = KFold(3).split(X)
        """,
        """
        print(
            clf.predict(X).sum(),
            forest.predict_proba(X)[:3],
            grid.best_params_,
            mine.get_params(),
            mine.predict(X[:2]),
        )
        print(forest.random_state is rng, rng.rand(), X.sum())
        """,
        omitted=("folds",),
    ),
    Notebook(
        "matplotlib",
        """
        import matplotlib.pyplot as plt, numpy as np

        fig, (ax, ax2) = plt.subplots(1, 2)
        (line,) = ax.plot([1, 2, 3], label="l")
        im = ax2.imshow(np.eye(3))
        ax.legend()
        rc = plt.rcParams
        cm = plt.get_cmap("viridis")
        style = dict(plt.rcParams.copy())
        """,
        """
        line.set_ydata([4, 5, 6])
        fig.canvas.draw()
        print(rc is plt.rcParams)
        print(
            ax.lines[0] is line,
            fig.axes[0] is ax,
            line.get_ydata(),
            im.get_array().sum(),
            ax.get_legend().get_texts()[0].get_text(),
            cm(0.5),
        )
        """,
    ),
    Notebook(
        "animations-and-events",
        """
        import matplotlib.pyplot as plt
        from matplotlib.animation import FuncAnimation

        fig, ax = plt.subplots()
        anim = FuncAnimation(fig, lambda i: [], frames=3, cache_frame_data=False)
        anim._draw_was_started = True
        title = "kept"
        """,
        """
        print(title)
        """,
        omitted=("anim",),
    ),
    Notebook(
        "plotly",
        """
        import plotly.graph_objects as go, plotly.express as px

        fig = go.Figure(go.Scatter(x=[1, 2], y=[3, 4]))
        fig.update_layout(title="T")
        bar = px.bar(x=["a", "b"], y=[1, 2])
        """,
        """
        fig.data[0].y = (9, 9)
        print(fig.data[0].y, fig.layout.title.text, bar.data[0].y, len(fig.to_json()))
        """,
    ),
    Notebook(
        "progress-bars",
        """
        from tqdm import tqdm, trange
        from tqdm.auto import tqdm as auto

        bar = tqdm(range(10), disable=True)
        std = trange(3, leave=False)
        std.update(1)
        done = list(tqdm(range(3), disable=True))
        make = tqdm

        class Run:
            def __init__(self):
                self.bar, self.n = std, 1

        run = Run()
        """,
        """
        print(done, make is tqdm)
        """,
        omitted=("bar", "std", "run"),
    ),
    Notebook(
        "widgets",
        """
        import ipywidgets as w
        from IPython.display import HTML, Image, Markdown, display

        s = w.IntSlider(3)
        box = w.VBox([s])
        out = w.Output()
        settings = {"slider": s}
        html, md = HTML("<b>x</b>"), Markdown("# t")
        value = s.value
        """,
        """
        print(html.data, md.data, value)
        """,
        omitted=("s", "box", "out", "settings"),
    ),
    Notebook(
        "databases",
        """
        import sqlite3, contextlib

        con = sqlite3.connect("x.db")
        con.row_factory = sqlite3.Row
        cur = con.cursor()
        cur.execute("create table if not exists t (a)")
        rows = cur.execute("select 1 as a").fetchall()
        plain = [tuple(r) for r in rows]

        class Repo:
            def __init__(self, con):
                self.con, self.cache = con, {"a": plain}

        repo = Repo(con)
        cache = repo.cache
        """,
        """
        cache["a"].append(2)
        print(plain)
        """,
        omitted=("con", "cur", "repo", "rows"),
    ),
    Notebook(
        "the-web",
        """
        import requests, urllib.request, http.client, json, yaml, urllib3

        session = requests.Session()
        session.headers["x"] = "y"
        req = requests.Request("GET", "http://example.invalid").prepare()
        parsed = urllib.request.urlparse("http://a/b?c")
        conn = http.client.HTTPConnection("localhost")
        config = yaml.safe_load("a: [1, 2]")
        opener = urllib.request.build_opener()
        pool = urllib3.PoolManager()
        """,
        """
        print(
            session.headers["x"],
            req.url,
            parsed.path,
            conn.host,
            config,
            len(pool.pools),
            len(opener.handlers) > 3,
        )
        """,
    ),
    Notebook(
        "traits-and-pydantic",
        """
        import traitlets, pydantic, typing

        class T(traitlets.HasTraits):
            n = traitlets.Int(3)
            @traitlets.observe("n")
            def _n(self, change):
                changes.append(change["new"])

        changes = []
        t = T()
        t.n = 4

        class User(pydantic.BaseModel):
            name: str
            age: int = 0
            tags: typing.List[str] = []

        u = User(name="x", age="3")
        """,
        """
        t.n = 5
        print(changes, t.n)
        print(u, User(name="y"), isinstance(u, User))
        try:
            User(age="no")
        except pydantic.ValidationError as e:
            print(e.error_count())
        """,
    ),
    Notebook(
        "attrs-and-others",
        """
        import attrs, sympy, networkx as nx, joblib, tokenizers

        @attrs.define
        class P:
            x: int
            y: list = attrs.field(factory=list)

        p = P(1)
        x = sympy.Symbol("x")
        expr = sympy.sin(x) ** 2
        graph = nx.path_graph(3)
        graph.nodes[0]["k"] = p
        delayed = joblib.delayed(len)
        """,
        """
        p.y.append(1)
        print(
            p,
            P(2),
            expr.diff(x),
            graph.nodes[0]["k"] is p,
            expr.free_symbols == {x},
            delayed([1])[0],
        )
        """,
    ),
    Notebook(
        "transformers",
        """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
        model = GPT2LMHeadModel(config).eval()
        out = model(torch.arange(4)[None])
        ids = out.logits.argmax(-1)
        """,
        """
        print(
            model.lm_head.weight is model.transformer.wte.weight,
            model(torch.arange(4)[None]).logits.sum().item(),
            ids,
            model.config.n_embd,
        )
        """,
        partly=("out",),
    ),
    Notebook(
        "concurrency",
        """
        import asyncio, threading, multiprocessing as mp, concurrent.futures as cf

        async def work():
            return 1

        result = asyncio.new_event_loop().run_until_complete(work())
        loop = asyncio.new_event_loop()
        task = loop.create_task(work())
        future = loop.create_future()
        q, ml, val, arr = mp.Queue(), mp.Lock(), mp.Value("i"), mp.Array("d", 3)
        ctx = mp.get_context("spawn")
        child = mp.Process(target=print)
        parent_end, child_end = mp.Pipe()
        pool = cf.ProcessPoolExecutor(1)
        stop = threading.Event()

        class Worker(threading.Thread):
            def run(self):
                pass

        worker = Worker()
        results = [result]
        """,
        """
        print(result, results, stop.is_set())
        """,
        omitted=(
            "loop",
            "task",
            "future",
            "q",
            "ml",
            "val",
            "arr",
            "child",
            "parent_end",
            "child_end",
            "pool",
            "worker",
        ),
    ),
    Notebook(
        "archives-and-streams",
        """
        import zipfile, tarfile, gzip, io, csv, zlib, hashlib, pathlib, itertools, array

        z = zipfile.ZipFile("a.zip", "w")
        z.writestr("a", "b")
        t = tarfile.open("a.tar", "w")
        g = gzip.open("a.gz", "wb")
        reader = csv.DictReader(io.StringIO("a\\n1\\n2\\n"))
        rows = list(reader)
        comp = zlib.compressobj()
        h = hashlib.sha256(b"x")
        cnt = itertools.count(5)
        next(cnt)
        cyc = itertools.cycle("ab")
        next(cyc)
        nums = array.array("d", [1, 2])
        tee1, tee2 = itertools.tee([1, 2, 3])
        next(tee1)
        chained = itertools.chain([1], [2])
        mapped = map(str, [1, 2])
        where = pathlib.Path(".").resolve().name != ""
        """,
        """
        print(
            rows,
            next(cnt),
            next(cyc),
            nums,
            list(tee1),
            list(tee2),
            list(chained),
            list(mapped),
            where,
        )
        """,
        omitted=("z", "t", "g", "reader", "comp", "h"),
    ),
    Notebook(
        "settings-of-libraries",
        """
        import numpy as np, pandas as pd, torch, matplotlib.pyplot as plt

        np.set_printoptions(precision=2)
        np.seterr(divide="ignore")
        pd.set_option("display.max_rows", 7)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        plt.style.use("ggplot")
        """,
        """
        print(np.array([1 / 3]), np.geterr()["divide"], pd.get_option("display.max_rows"))
        print(torch.zeros(1).dtype, torch.is_grad_enabled(), plt.rcParams["axes.facecolor"])
        """,
    ),
]
