"""Whole notebooks with a mix of everything, and a loop that continues."""

from __future__ import annotations

from tests.namespaces import Notebook

NOTEBOOKS = [
    Notebook(
        "exploring-a-table",
        """
        import numpy as np, pandas as pd, matplotlib.pyplot as plt, sqlite3
        from pathlib import Path
        # %%
        DATA = Path("sales.csv")
        rng = np.random.default_rng(7)
        pd.DataFrame({"shop": rng.choice(list("abc"), 50), "sum": rng.normal(100, 9, 50)}).to_csv(
            DATA
        )
        df = pd.read_csv(DATA, index_col=0)
        by_shop = df.groupby("shop")["sum"]
        con = sqlite3.connect(":memory:")
        df.to_sql("sales", con)
        top = pd.read_sql("select shop, max(sum) as m from sales group by shop", con)
        fig, ax = plt.subplots()
        bars = ax.bar(top.shop, top.m)

        def clean(frame, limit=None):
            return frame[frame["sum"] < (limit or LIMIT)]

        LIMIT = 105
        small = clean(df)
        # %%
        df.describe()
        """,
        """
        LIMIT = 100
        df.loc[0, "sum"] = 1.0
        print(
            by_shop.sum().round(6).to_dict(),
            top,
            len(clean(df)),
            len(small),
            bars[0].get_height(),
        )
        print(Out[3].loc["count"].tolist(), rng.normal(), DATA.exists(), ax.figure is fig)
        """,
        omitted=("con",),
    ),
    Notebook(
        "classifying-images",
        """
        import torch, torch.nn as nn, numpy as np, time, copy
        from torch.utils.data import DataLoader, TensorDataset
        from tqdm.auto import tqdm

        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        images = torch.rand(64, 1, 8, 8)
        labels = (images.mean((1, 2, 3)) > 0.5).long()
        train = DataLoader(
            TensorDataset(images, labels), batch_size=16, shuffle=True, num_workers=0
        )
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
        )
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
        history = {"loss": [], "lr": []}
        best = {"loss": float("inf"), "state": None}
        # %%
        def run_epoch():
            for x, y in train:
                optimizer.zero_grad(set_to_none=True)
                loss = criterion(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                history["loss"].append(loss.item())
            scheduler.step()
            history["lr"].append(scheduler.get_last_lr()[0])
            if loss < best["loss"]:
                best.update(loss=loss.item(), state=copy.deepcopy(model.state_dict()))
            return loss

        last = run_epoch()
        progress = tqdm(range(3), disable=True)
        x, y = next(iter(train))
        pred = model(x)
        started = time.time()
        """,
        """
        run_epoch()
        run_epoch()
        print(
            history,
            best["loss"],
            best["state"]["0.weight"].sum().item(),
            device,
            pred.sum().item(),
        )
        print(optimizer.param_groups[0]["params"][0] is model[0].weight, x.shape)
        """,
        omitted=("progress",),
        partly=("last", "pred"),
    ),
    Notebook(
        "adversaries",
        """
        import torch
        from torch import nn

        torch.manual_seed(3)

        class Block(nn.Module):
            def __init__(self, *sizes):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
            def forward(self, x):
                for layer in self.layers:
                    x = torch.tanh(layer(x))
                return x

        class Gan:
            def __init__(self):
                self.make, self.judge = Block(4, 8, 2), Block(2, 8, 1)
                self.optimizers = {
                    n: torch.optim.RMSprop(m.parameters())
                    for n, m in vars(self).items()
                    if isinstance(m, nn.Module)
                }
                self.noise = torch.Generator().manual_seed(5)
            def step(self):
                fake = self.make(torch.randn(8, 4, generator=self.noise))
                self.last = fake
                loss = self.judge(fake).mean()
                loss.backward()
                for o in self.optimizers.values():
                    o.step()
                return loss.item()

        gan = Gan()
        losses = [gan.step() for _ in range(3)]
        judge = gan.judge
        """,
        """
        losses += [gan.step() for _ in range(3)]
        print(losses, judge is gan.judge, list(gan.optimizers))
        """,
        partly=("gan",),
    ),
    Notebook(
        "learning-by-reward",
        """
        import random, collections, dataclasses, numpy as np

        Step = collections.namedtuple("Step", "state action reward")

        @dataclasses.dataclass
        class Walk:
            size: int = 5
            at: int = 2
            trace: list = dataclasses.field(default_factory=list, repr=False)
            def move(self, by):
                self.at = min(self.size - 1, max(0, self.at + by))
                reward = float(self.at == self.size - 1)
                self.trace.append(Step(self.at, by, reward))
                return reward

        random.seed(1)
        np.random.seed(1)
        q = collections.defaultdict(lambda: np.zeros(2))
        memory = collections.deque(maxlen=50)
        env = Walk()

        def episode(eps=0.3):
            while True:
                a = int(np.argmax(q[env.at])) if random.random() > eps else np.random.randint(2)
                was, r = env.at, env.move(a * 2 - 1)
                q[was][a] += 0.5 * (r + 0.9 * q[env.at].max() - q[was][a])
                memory.append(env.trace[-1])
                if r or len(env.trace) % 40 == 0:
                    env.at = 2
                    yield len(env.trace)

        episodes = episode()
        lengths = [next(episodes) for _ in range(5)]
        """,
        """
        episodes = episode()
        lengths += [next(episodes) for _ in range(5)]
        print(
            lengths,
            {k: v.tolist() for k, v in sorted(q.items())},
            memory[-1] is env.trace[-1],
            len(memory),
        )
        """,
        omitted=("episodes",),
    ),
    Notebook(
        "words",
        """
        import re, collections, functools, itertools, heapq
        from sklearn.feature_extraction.text import CountVectorizer

        text = "the cat sat on the mat and the dog sat on the log"
        token = re.compile(r"\\w+")
        tokenize = lambda s: token.findall(s.lower())
        vocabulary = {w: i for i, w in enumerate(sorted(set(tokenize(text))))}
        inverse = dict(map(reversed, vocabulary.items()))
        counts = collections.Counter(tokenize(text))
        pipeline = functools.reduce(
            lambda f, g: lambda x: g(f(x)), [str.strip, str.title, tokenize]
        )
        vectors = CountVectorizer(tokenizer=tokenize, token_pattern=None).fit([text])
        heap = [(-n, w) for w, n in counts.items()]
        heapq.heapify(heap)

        class Trie:
            __slots__ = ("kids", "end")
            def __init__(self):
                self.kids, self.end = collections.defaultdict(Trie), False
            def add(self, word):
                node = self
                for c in word:
                    node = node.kids[c]
                node.end = True
            def words(self, so_far=""):
                if self.end:
                    yield so_far
                for c, kid in sorted(self.kids.items()):
                    yield from kid.words(so_far + c)

        trie = Trie()
        for w in vocabulary:
            trie.add(w)
        match = token.search(text)
        pairs = zip(tokenize(text), tokenize(text)[1:])
        first = next(pairs)
        """,
        """
        trie.add("zebra")
        print(
            list(trie.words()),
            counts.most_common(2),
            pipeline(" a b "),
            heapq.heappop(heap),
            first,
            next(pairs),
        )
        print(vectors.transform(["the the"]).toarray().tolist(), inverse[0])
        """,
        omitted=("match",),
    ),
    Notebook(
        "simulating",
        """
        import numpy as np, scipy.stats as st, math, statistics, decimal, fractions

        rng = np.random.default_rng(2024)
        streams = rng.spawn(3)
        prior = st.beta(2, 3)
        samples = prior.rvs(1000, random_state=rng)
        paths = np.cumsum(rng.normal(size=(50, 200)), axis=1)
        final, first_half = paths[:, -1], paths[:, :100]
        ci = np.quantile(final, [0.05, 0.95])

        def estimate(n, rng=rng):
            return 4 * (rng.random((n, 2)) ** 2).sum(1).__lt__(1).mean()

        estimates = [estimate(100) for _ in range(3)]
        exact = fractions.Fraction(22, 7)
        """,
        """
        paths[0, -1] = 0
        print(
            final[0],
            ci,
            estimate(1000),
            [s.random() for s in streams],
            prior.mean(),
            samples.mean(),
            exact,
        )
        print(np.shares_memory(first_half, paths), estimates)
        """,
    ),
    Notebook(
        "searching-parameters",
        """
        import itertools, json, logging, time, numpy as np, pandas as pd
        from concurrent.futures import ThreadPoolExecutor
        from sklearn.svm import SVC
        from sklearn.datasets import make_moons
        from sklearn.model_selection import cross_val_score, train_test_split

        log = logging.getLogger("search")
        log.addHandler(logging.StreamHandler())
        log.setLevel("WARNING")
        X, y = make_moons(80, noise=0.2, random_state=0)
        Xa, Xb, ya, yb = train_test_split(X, y, random_state=0)
        grid = list(itertools.product([0.1, 1], ["linear", "rbf"]))
        pool = ThreadPoolExecutor(2)

        def trial(p):
            return {
                "p": p,
                "score": cross_val_score(SVC(C=p[0], kernel=p[1]), Xa, ya, cv=3).mean(),
            }

        futures = [pool.submit(trial, p) for p in grid]
        results = [f.result() for f in futures]
        table = pd.DataFrame(results).sort_values("score")
        best = SVC(C=table.p.iloc[-1][0], kernel=table.p.iloc[-1][1]).fit(Xa, ya)
        remaining = iter(grid)
        next(remaining)
        """,
        """
        print(
            results == [trial(p) for p in grid],
            best.score(Xb, yb),
            table.score.round(6).tolist(),
            list(remaining),
        )
        print(log.level, len(log.handlers), [f.result()["p"] for f in futures])
        """,
        omitted=("pool",),
    ),
    Notebook(
        "fetching",
        """
        import asyncio, json, urllib.parse, dataclasses, enum, typing, requests, threading, queue

        class Kind(str, enum.Enum):
            PAGE = "page"
            IMAGE = "image"

        @dataclasses.dataclass(frozen=True)
        class Link:
            url: str
            kind: Kind = Kind.PAGE
            parents: typing.Tuple["Link", ...] = ()

        root = Link("http://a")
        seen = {root, Link("http://b", Kind.IMAGE, (root,))}
        todo = queue.Queue()
        [todo.put(l) for l in sorted(seen, key=lambda l: l.url)]
        session = requests.Session()
        session.headers["User-Agent"] = "me"
        session.cookies.set("k", "v")
        results = {}
        stop = threading.Event()

        def work():
            while not stop.wait(0.01):
                pass

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        stop.set()
        worker.join()

        async def fetch(link):
            return {"url": link.url, "q": urllib.parse.quote("a b")}

        async def all_of(links):
            return await asyncio.gather(*map(fetch, links))

        pending = fetch(root)
        cache = json.loads('{"a": [1, {"b": null}]}')
        """,
        """
        import asyncio

        got = asyncio.new_event_loop().run_until_complete(all_of([root]))
        print(
            got,
            root in seen,
            Link("http://a") in seen,
            todo.get() is root or todo.qsize(),
            Kind("page") is root.kind,
        )
        print(
            session.headers["User-Agent"],
            session.cookies["k"],
            stop.is_set(),
            cache,
            Kind.IMAGE == "image",
        )
        """,
        omitted=("worker", "pending"),
    ),
    Notebook(
        "fine-tuning",
        """
        import torch, math, contextlib
        from transformers import (
            BertConfig,
            BertForSequenceClassification,
            get_linear_schedule_with_warmup,
        )

        torch.manual_seed(11)
        config = BertConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=40,
        )
        model = BertForSequenceClassification(config)
        for p in model.bert.embeddings.parameters():
            p.requires_grad = False
        decay = [p for n, p in model.named_parameters() if p.requires_grad and "bias" not in n]
        rest = [p for n, p in model.named_parameters() if p.requires_grad and "bias" in n]
        opt = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        )
        sched = get_linear_schedule_with_warmup(opt, 2, 20)
        ids, labels = torch.randint(0, 40, (8, 6)), torch.randint(0, 2, (8,))
        shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        losses = []

        def step():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            if len(losses) % 2:
                opt.step()
                sched.step()
                opt.zero_grad()
            with torch.no_grad():
                for n, p in model.named_parameters():
                    shadow[n].lerp_(p, 0.1)
            losses.append(loss.item())

        for _ in range(3):
            step()
        """,
        """
        for _ in range(3):
            step()
        print(
            losses,
            sched.get_last_lr(),
            opt.param_groups[0]["params"][0] is decay[0],
            len(opt.state),
        )
        print(
            shadow["classifier.weight"].sum().item(),
            model.bert.embeddings.word_embeddings.weight.requires_grad,
        )
        """,
    ),
    Notebook(
        "dashboards",
        """
        import ipywidgets as widgets, plotly.graph_objects as go, pandas as pd
        from IPython.display import display, HTML, clear_output

        data = pd.DataFrame({"t": range(5), "v": [1, 4, 9, 16, 25]})
        slider = widgets.IntSlider(value=2, min=0, max=4)
        label = widgets.Label()
        chosen = {"row": 2}

        def on_change(change):
            chosen["row"] = change["new"]
            label.value = str(data.v[change["new"]])

        slider.observe(on_change, "value")
        slider.value = 3
        fig = go.Figure(go.Scatter(x=data.t, y=data.v))
        layout = {"children": [slider, label]}
        page = HTML(data.to_html())
        """,
        """
        fig.add_hline(y=chosen["row"])
        print(
            chosen,
            fig.data[0].y.tolist(),
            len(fig.layout.shapes),
            "table" in page.data,
            on_change.__globals__ is globals(),
        )
        """,
        omitted=("slider", "label", "layout"),
    ),
    Notebook(
        "lessons-in-python",
        """
        import contextlib, functools, operator, time, types, itertools

        def memo(f):
            cache = {}
            @functools.wraps(f)
            def inner(n):
                if n not in cache:
                    cache[n] = f(n)
                return cache[n]
            inner.cache = cache
            return inner

        @memo
        def fib(n):
            return n if n < 2 else fib(n - 1) + fib(n - 2)

        fib(20)

        @contextlib.contextmanager
        def timed(label):
            yield events.append(label)

        events = []

        class Account:
            _all = {}
            def __new__(cls, name):
                if name not in cls._all:
                    cls._all[name] = super().__new__(cls)
                return cls._all[name]
            def __init__(self, name):
                self.name = name
                self.__dict__.setdefault("sum", 0)
            def __iadd__(self, n):
                self.sum += n
                return self
            def __call__(self):
                return self.sum

        a = Account("x")
        a += 5
        b = Account("x")

        class Registry(type):
            known = {}
            def __init__(cls, name, bases, body):
                super().__init__(name, bases, body)
                Registry.known[name] = cls

        class Plugin(metaclass=Registry):
            pass

        class Csv(Plugin):
            def read(self):
                return "csv", super().__repr__()[:1]

        compose = lambda *fs: functools.reduce(lambda f, g: lambda x: f(g(x)), fs)
        inc = compose(lambda x: x + 1, lambda x: x * 2)
        primes = (n for n in itertools.count(2) if all(n % d for d in range(2, n)))
        first = list(itertools.islice(primes, 4))
        ns = types.SimpleNamespace(deep=types.SimpleNamespace(x=[first]))
        matrix = [[0] * 3] * 2
        """,
        """
        a += 1
        with timed("now"):
            pass
        matrix[0][1] = 9
        print(
            fib.cache is fib.__closure__[0].cell_contents or fib.cache[20],
            fib(25),
            events,
            a is b,
            b(),
            Account("x") is a,
        )
        print(
            list(Registry.known),
            Registry.known["Csv"]().read(),
            inc(3),
            ns.deep.x[0] is first,
            matrix,
        )

        class Json(Plugin):
            pass

        print(list(Registry.known))
        """,
        omitted=("primes",),
    ),
]
