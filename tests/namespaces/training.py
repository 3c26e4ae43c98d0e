"""torch on the host: tensors, modules, optimizers, data."""

from __future__ import annotations

from tests.namespaces import Notebook

NOTEBOOKS = [
    Notebook(
        "tensors",
        """
        import torch, numpy as np

        t = torch.arange(60_000.0)
        v = t[10:20]
        tr = t.view(200, 300).T
        ex = torch.ones(1).expand(3)
        leaf = torch.ones(3, requires_grad=True)
        (leaf * 2).sum().backward()
        g = leaf.grad
        half, cplx, boolean = t[:3].half(), torch.tensor([1 + 2j]), torch.tensor([True])
        conj, neg = cplx.conj(), cplx.conj().imag
        arr = np.zeros(20_000)
        fa = torch.from_numpy(arr)
        fview = torch.from_numpy(arr[5:])
        na = t.numpy()
        small = torch.zeros(3)
        sn = small.numpy()
        st = small.untyped_storage()
        ty = small.storage()
        empty, scalar = torch.empty(0, 3), torch.tensor(5)
        det = leaf.detach()
        dot = leaf.data
        with torch.inference_mode():
            inf = torch.ones(2)
        meta = torch.empty(5, device="meta")
        sparse = torch.eye(3).to_sparse()
        csr = torch.eye(3).to_sparse_csr()
        quant = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        loss = (leaf**2).sum()
        hidden = {"h": [leaf * 3]}
        fn = loss.grad_fn
        par = torch.nn.Parameter(torch.zeros(2))
        par.tag = "p"
        buf = torch.nn.Buffer(torch.ones(1))
        size, dt, dev, fmt = t.shape, torch.bfloat16, torch.device("cpu"), torch.channels_last
        nhwc = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
        seen = []
        hooked = torch.ones(2, requires_grad=True)
        handle = hooked.register_hook(lambda g: seen.append(1))

        class Sub(torch.Tensor):
            pass

        sub = torch.ones(2).as_subclass(Sub)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        mem = torch.zeros(2).share_memory_()
        """,
        """
        t[15] = -1
        print(v, tr.stride(), tr[15, 0], ex.stride(), na[15], v._base is None or True)
        leaf.grad.add_(1)
        print(g, leaf.requires_grad, leaf.is_leaf, half.dtype, conj, conj.is_conj(), neg, boolean)
        arr[7] = 3
        print(fa[7], fview[2], arr.base is None)
        small[1] = 4
        print(sn, st.nbytes(), ty[1], empty.shape, scalar)
        with torch.no_grad():
            leaf[0] = 7
        print(
            det,
            dot,
            inf.is_inference(),
            meta.device,
            sparse.to_dense().sum(),
            csr.layout,
            quant,
            loss.item(),
        )
        print(
            hidden["h"][0].tolist(),
            par,
            par.tag,
            type(buf),
            size,
            dt,
            dev,
            fmt,
            nhwc.is_contiguous(memory_format=fmt),
        )
        hooked.sum().backward()
        print(seen)
        handle.remove()
        hooked.sum().backward()
        print(seen, type(sub).__name__, mem.is_shared())
        print(nested.size(0), [x.sum().item() for x in nested.unbind()])
        """,
        omitted=("fn",),
        partly=("loss", "hidden"),
    ),
    Notebook(
        "training-state",
        """
        import torch, torch.nn as nn, torch.nn.functional as F

        torch.manual_seed(1)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb, self.drop = nn.Embedding(50, 16), nn.Dropout(0.5)
                self.out = nn.Linear(16, 50, bias=False)
                self.out.weight = self.emb.weight
                self.norm = nn.BatchNorm1d(16)
                self.rnn = nn.GRU(16, 16)
                self.register_buffer("seen", torch.zeros(1))
                self.steps = 0
            def forward(self, x):
                self.steps += 1
                self.seen += 1
                return self.out(self.drop(self.norm(self.rnn(self.emb(x))[0])))

        net = Net()
        frozen = nn.Linear(2, 2).requires_grad_(False).eval()
        opt = torch.optim.Adam(net.parameters(), lr=1e-2)
        sgd = torch.optim.SGD([{"params": net.rnn.parameters()}], lr=0.1, momentum=0.9)
        # %%
        decay = 0.9
        # %%
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: decay**e)
        cyc = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=50)
        cos = torch.optim.lr_scheduler.SequentialLR(
            sgd,
            [
                torch.optim.lr_scheduler.ConstantLR(sgd),
                torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 9),
            ],
            [3],
        )
        ema = torch.optim.swa_utils.AveragedModel(net)
        scaler = torch.amp.GradScaler("cpu", enabled=True)
        acts = []
        hook = net.norm.register_forward_hook(lambda m, i, o: acts.append(o.detach().mean()))
        data = torch.randint(0, 50, (64,))
        losses = []

        def step():
            x = data[torch.randint(0, 64, (8,))]
            opt.zero_grad()
            loss = F.cross_entropy(net(x), x)
            loss.backward()
            opt.step()
            sched.step()
            sgd.step()
            cyc.step()
            ema.update_parameters(net)
            losses.append(loss.item())

        for _ in range(3):
            step()
        weights = dict(net.named_parameters())
        first = weights["emb.weight"]
        """,
        """
        for _ in range(4):
            step()
        print(
            losses,
            opt.param_groups[0]["lr"],
            sgd.param_groups[0]["lr"],
            net.steps,
            net.seen,
            len(acts),
        )
        print(
            net.out.weight is net.emb.weight,
            first is net.emb.weight,
            opt.param_groups[0]["params"][0] is first,
            first in opt.state,
            sched.optimizer is opt,
            cyc.optimizer is sgd,
            ema.n_averaged,
            frozen.training,
            frozen.weight.requires_grad,
        )
        print(
            isinstance(net, Net),
            net.training,
            sum(p.double().sum() for p in ema.parameters()).item(),
            scaler.get_scale(),
        )
        hook.remove()
        n = len(acts)
        step()
        print(len(acts) == n, torch.rand(1))
        """,
    ),
    Notebook(
        "torch-randomness",
        """
        import torch

        torch.manual_seed(4)
        torch.rand(3)
        gen = torch.Generator().manual_seed(9)
        torch.rand(2, generator=gen)
        twin = gen
        default = torch.default_generator
        """,
        """
        print(
            torch.rand(2),
            torch.rand(2, generator=gen),
            torch.rand(1, generator=twin),
            twin is gen,
            default is torch.default_generator,
        )
        """,
    ),
    Notebook(
        "data-loaders",
        """
        import torch
        from torch.utils.data import (
            Dataset,
            DataLoader,
            TensorDataset,
            RandomSampler,
            Subset,
            random_split,
        )

        class Squares(Dataset):
            def __init__(self, n):
                self.n = n
            def __len__(self):
                return self.n
            def __getitem__(self, i):
                return i, i * i

        ds = Squares(10)
        torch.manual_seed(0)
        g = torch.Generator().manual_seed(3)
        loader = DataLoader(ds, batch_size=4, shuffle=True, generator=g)
        workers = DataLoader(
            ds, batch_size=5, num_workers=1, collate_fn=lambda rows: [b for a, b in rows]
        )
        tensors = TensorDataset(torch.arange(4))
        train, val = random_split(ds, [7, 3])
        it = iter(loader)
        next(it)
        running = iter(workers)
        next(running)
        keeps = DataLoader(ds, num_workers=1, persistent_workers=True)
        next(iter(keeps))
        sampler = RandomSampler(ds, generator=g)
        """,
        """
        print(
            next(iter(loader)),
            list(sampler)[:5],
            sampler.generator is g,
            loader.dataset is ds,
            train.indices,
            tensors[1],
        )
        print(workers.num_workers, workers.collate_fn([(1, 2)]))
        """,
        omitted=("it", "running", "keeps"),
    ),
    Notebook(
        "torch-machinery",
        """
        import torch, torch.nn as nn, functools

        par = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        script = torch.jit.script(nn.Linear(2, 2))
        traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
        plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        @torch.no_grad()
        def evaluate(m):
            return m(torch.ones(1, 2)).requires_grad

        class Fn(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, g):
                return g * 2

        stats = {"acc": torch.tensor(0.5), "n": 3}
        sd = plain.state_dict()
        bad_hook = nn.Linear(2, 2)
        lines = (i for i in range(3))
        handle = bad_hook.register_forward_hook(lambda *a: next(lines))
        src = iter([1])
        made = nn.Linear(2, 2)
        made.source = (x for x in src)
        lazy = nn.LazyLinear(3)
        comp = torch.compile(nn.Linear(2, 2), backend="eager")
        lr = nn.Linear(2, 2)
        o = torch.optim.SGD(lr.parameters(), lr=1)
        o.register_step_pre_hook(lambda *a: None)
        pk = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
        dist = torch.distributions.Normal(torch.zeros(1), torch.ones(1))
        """,
        """
        x = torch.ones(1, requires_grad=True)
        Fn.apply(x).backward()
        plain[0].weight.data.fill_(1)
        print(
            evaluate(plain),
            x.grad,
            stats,
            sd["0.weight"],
            pk.batch_sizes,
            dist.mean,
            lazy(torch.ones(1, 2)).shape,
        )
        """,
        omitted=("par", "script", "traced", "made", "lines"),
        partly=("o",),
    ),
]
