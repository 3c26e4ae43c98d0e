"""NumPy, SciPy and pandas."""

from __future__ import annotations

from tests.namespaces import Notebook

NOTEBOOKS = [
    Notebook(
        "arrays",
        """
        import numpy as np

        big = np.arange(100_000.0)
        view = big[10:20]
        back = big[::-1]
        every = big[::1000].reshape(10, 10)
        fort = np.asfortranarray(np.arange(12.0).reshape(3, 4))
        fv = fort[1:, ::2]
        perm = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1).copy("K")
        pv = perm[1]
        same = big
        struct = np.zeros(3, dtype=[("a", "i4"), ("b", "U5")])
        col = struct["b"]
        records = np.recarray((2,), dtype=[("a", int)])
        records.a = [1, 2]
        rec = np.rec.array([(1, 2.0)], dtype=[("x", int), ("y", float)])
        dates = np.array(["2024-01-01", "NaT"], dtype="datetime64[D]")
        text, boolean, half = np.array(["a", "bc"]), np.array([True, False]), np.float16([1, 2])
        cplx, zero_d, empty = np.array([1j]), np.array(5.0), np.zeros((0, 3))
        locked = np.arange(5)
        lv = locked[1:]
        locked.flags.writeable = False
        odd = np.broadcast_to(np.arange(3), (4, 3))
        scalar, dt = np.float32(1.5), np.dtype(">i4")
        swapped = np.arange(3, dtype=">i4")
        ma = np.ma.masked_array([1, 2, 3], mask=[0, 1, 0], fill_value=9)
        md = ma.data
        mat = np.matrix([[1, 2], [3, 4]])
        raw = bytearray(b"abcdef")
        over = np.frombuffer(raw, dtype="u1")
        const = np.frombuffer(b"xyz", dtype="u1")
        inner = [1]
        objs = np.array([inner, None, "x", inner], dtype=object)
        ov = objs[::2]
        ot = np.array([[inner, 1], [2, 3]], dtype=object).T
        poly = np.polynomial.Polynomial([1, 2])

        class Mine(np.ndarray):
            def __array_finalize__(self, o):
                self.info = getattr(o, "info", "none")

        mine = np.arange(3).view(Mine)
        mine.info = "hi"
        plain = mine.view(np.ndarray)
        uf, fn = np.add, np.mean
        vec = np.vectorize(lambda x: x + 1)
        it = np.nditer([1, 2])
        """,
        """
        big[15] = -1
        back[0] = -2
        print(
            view,
            view.base is big,
            big[-1],
            every[1, 1],
            every.base is big,
            same is big,
            big.flags.owndata,
        )
        fort[1, 2] = 77
        perm[1, 0, 0] = 55
        struct["b"][0] = "zz"
        print(fv, fort.flags.f_contiguous, pv, perm.strides, col)
        print(records, records.a, type(records) is np.recarray)
        print(rec.x, type(rec[0]).__name__, dates, text, boolean, half, cplx, zero_d, empty.shape)
        print(
            locked.flags.writeable,
            lv.flags.writeable,
            odd.strides,
            odd.flags.writeable,
            scalar,
            dt,
            swapped,
        )
        md[0] = 40
        print(ma, ma.fill_value, ma.sum(), mat * mat, type(mat).__name__)
        raw[0] = 90
        print(over[0], const, over.base is not None)
        inner.append(2)
        objs[0] = "new"
        print(ov, objs, ot, objs[3] is inner, np.shares_memory(ov, objs))
        print(
            poly(2),
            mine.info,
            type(mine).__name__,
            plain.base is mine or np.shares_memory(plain, mine),
            uf(1, 2),
            vec([1]),
        )
        """,
        omitted=("it",),
    ),
    Notebook(
        "numpy-randomness",
        """
        import numpy as np
        from numpy.random import randn

        np.random.seed(3)
        randn(3)
        gen = np.random.default_rng(5)
        gen.random(2)
        twin = gen
        bits = gen.bit_generator
        old = np.random.RandomState(9)
        old.rand()
        kids = np.random.SeedSequence(1).spawn(2)
        uniform = np.random.uniform
        """,
        """
        print(
            np.random.rand(),
            randn(),
            uniform(),
            np.random.normal(),
            gen.random(),
            twin is gen,
            gen.bit_generator is bits,
        )
        print(bits.random_raw(), gen.random(), old.rand(), kids[0].generate_state(1))
        """,
    ),
    Notebook(
        "memory-maps",
        """
        import numpy as np

        np.arange(1000.0).tofile("map.dat")
        ro = np.memmap("map.dat", dtype="f8", mode="r", shape=(10, 100))
        part = ro[2:4]
        cow = np.memmap("map.dat", dtype="f8", mode="c")
        cow[0] = 5
        rw = np.memmap("map.dat", dtype="f8", mode="r+")
        total = ro.sum()
        scaled = ro[0] * 2
        np.save("a.npy", np.arange(5))
        loaded = np.load("a.npy", mmap_mode="r")
        """,
        """
        print(
            ro.sum(),
            part[0, 0],
            part.shape,
            type(ro).__name__,
            cow[0],
            cow[1],
            total,
            scaled[:3],
            loaded,
            ro.flags.writeable,
        )
        """,
        omitted=("rw",),
    ),
    Notebook(
        "scipy",
        """
        import scipy.sparse as sp, scipy.stats as st, scipy.interpolate as si, numpy as np

        csr = sp.csr_matrix(np.eye(3))
        coo = sp.coo_array(np.eye(2))
        data = csr.data
        dist = st.norm(1, 2)
        spline = si.CubicSpline([0, 1, 2], [0, 1, 4])
        """,
        """
        data[0] = 5
        print(csr.toarray(), coo.sum(), dist.mean(), spline(1.5))
        """,
    ),
    Notebook(
        "dataframes",
        """
        import pandas as pd, numpy as np

        df = pd.DataFrame(
            {
                "a": [1, 2, 3],
                "b": ["x", "y", None],
                "c": pd.to_datetime(["2024-01-01"] * 3),
                "d": pd.Categorical(["u", "v", "u"]),
                "e": [1.5, np.nan, 2],
            },
            index=list("pqr"),
        )
        s = df["a"]
        same = df
        sub = df[["a", "e"]]
        head = df.head(2)
        renamed = df.rename(columns={"a": "A"})
        multi = df.set_index(["a", "b"])
        gb = df.groupby("d")
        idx = df.index
        ts = pd.Series(range(5), index=pd.date_range("2024", periods=5, freq="D"))
        nullable = pd.array([1, None], dtype="Int64")
        interval = pd.interval_range(0, 3)
        df.attrs["source"] = "test"
        wide = pd.DataFrame(np.arange(200_000.0).reshape(1000, 200))
        wcol = wide[3]
        rolling = ts.rolling(2)
        style_fn = lambda v: "x"
        cat = df["d"].cat
        acc = df["b"].str
        """,
        """
        df.loc["p", "a"] = 100
        wide.iloc[0, 3] = -1.0
        print(
            df,
            s.tolist(),
            same is df,
            sub.a.tolist(),
            head.a.tolist(),
            renamed.A.tolist(),
            wcol[0],
            idx.tolist(),
        )
        s.iloc[1] = 55
        print(
            df.a.tolist(),
            multi.index.names,
            gb.a.sum().to_dict(),
            ts.index.freq,
            nullable,
            interval[0],
        )
        print(
            df.attrs,
            df.dtypes.astype(str).tolist(),
            rolling.sum().tolist(),
            list(cat.categories),
            acc.upper().tolist(),
        )
        """,
    ),
    Notebook(
        "pandas-machinery",
        """
        import pandas as pd, io, sqlite3

        chunks = pd.read_csv(io.StringIO("a\\n1\\n2\\n3\\n"), chunksize=1)
        con = sqlite3.connect(":memory:")
        pd.DataFrame({"a": [1]}).to_sql("t", con)
        table = pd.read_sql("select * from t", con)
        store = {"con": con, "table": table}
        rows = table.itertuples()
        cols = table.items()
        """,
        """
        print(table)
        """,
        omitted=("chunks", "con", "store", "cols", "rows"),
    ),
]
