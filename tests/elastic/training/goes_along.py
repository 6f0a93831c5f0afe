"""A script for test_goes_along.py: a job of three that loses one, with all that an elastic job takes along in use.

Every rank's gradient is rank + 1 everywhere, so a weight says of how many ranks each step was, and the history beside
it in the state says the same: both must agree on every rank, whatever was lost. Each kind of optimizer has a model of
its own. argv: a file that is made before the process that starts as rank 1 is killed.
"""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist

import horoclone.torch as hvd

STEPS, LOST_AT, RATE = 24, 11, 0.5
KINDS = (
    "plain", "fp16", "int8", "topk", "powersgd", "cross_barrier", "sharded", "adasum", "local_sgd", "diloco"
)  # fmt: skip
ADASUM = {2: 1.5, 3: 2.25}  # of parallel gradients 1, 2 (and 3): the mean of two, and of that and the third


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, 4096, bias=False)
        self.second = torch.nn.Linear(1, 8, bias=False)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum() + self.second(x).sum()


def make(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Model()
    options: dict = {}
    if kind == "int8":
        options["compression"] = hvd.Compression.int8()
    if kind == "topk":
        options["compression"] = hvd.Compression.topk(0.5)
    if kind == "fp16":
        options["compression"] = hvd.Compression.fp16
    if kind == "powersgd":
        options["compression"] = hvd.Compression.powersgd(1)
    if kind == "cross_barrier":
        options["cross_barrier"] = model
    if kind == "sharded":
        options["shard_optimizer_state"] = True
    if kind == "adasum":
        options["op"] = hvd.Adasum
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    if kind in ("local_sgd", "diloco"):
        return model, optimizer
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def make_periodic(trained: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]]) -> list:
    """What averages parameters after every third step, which is where this job commits."""
    model, inner = trained["diloco"]
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    return [
        hvd.LocalSGD(*trained["local_sgd"], sync_every=3),
        hvd.DiLoCo([model], inner, outer, sync_every=3),
    ]


def in_the_process_group() -> None:
    """torch.distributed meets anew in each generation: the group of the one before has a member that is gone."""
    now = hvd.elastic.generation().number
    if dist.is_initialized() and in_the_process_group.generation != now:
        dist.destroy_process_group()
    if not dist.is_initialized():
        dist.init_process_group("horoclone")
        in_the_process_group.generation = now
    value = torch.full((5,), float(hvd.rank() + 1))
    dist.all_reduce(value)
    assert value.tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 5, value


in_the_process_group.generation = 0


def in_the_process_set(both: hvd.ProcessSet) -> None:
    if both.process_set_id is not None and both.included():
        value = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="both", process_set=both)
        assert value.item() == sum(rank + 1 for rank in both.ranks), (value, both.ranks)


def nothing_is_negotiated(trained: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]]) -> None:
    """In steps of these alone: each starts its bucket by a persistent plan, and no rank announces or plans anything."""
    hvd.barrier()
    before = hvd.metrics()
    for _ in range(5):
        for model, optimizer in trained.values():
            optimizer.zero_grad()
            model(torch.ones(1)).backward()
            optimizer.step()
    after = hvd.metrics()
    counted = {
        what: after[what] - before[what] for what in ("persistent", "request_lists_sent", "plans_sent")
    }
    assert counted == {"persistent": 10, "request_lists_sent": 0, "plans_sent": 0}, counted


def main(mark: str) -> None:
    both = hvd.ProcessSet([0, 2])  # those who will be left
    hvd.init(process_sets=[both])
    trained = {kind: make(kind) for kind in KINDS}
    parts = {f"model_{kind}": model for kind, (model, _) in trained.items()}
    parts |= {f"optimizer_{kind}": optimizer for kind, (_, optimizer) in trained.items()}
    state = hvd.elastic.TorchState(step=0, history=[], **parts)
    periodic = make_periodic(trained)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        now = hvd.elastic.generation()
        print(
            f"generation {now.number} of {now.size} at step {state.step} dropped {now.dropped_sets}",
            flush=True,
        )
        with contextlib.ExitStack() as stack:
            for one in periodic:
                stack.enter_context(one)
            steps(state, now)

    def steps(state: hvd.elastic.TorchState, now: hvd.elastic.Generation) -> None:
        persistent = [hvd.metrics()["persistent"]]  # of this generation, after each of its steps
        while state.step < STEPS:
            for model, optimizer in trained.values():
                optimizer.zero_grad()
                (model(torch.ones(1)) * (hvd.rank() + 1)).backward()
            if os.environ["HOROVOD_RANK"] == "1" and state.step == LOST_AT and not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), 9)
            for _, optimizer in trained.values():
                optimizer.step()
            in_the_process_group()
            if os.path.exists(mark) == (now.number > 1) and now.size < 4:
                in_the_process_set(both)
            state.history.append(hvd.size())
            state.step += 1
            time.sleep(0.01)
            persistent.append(hvd.metrics()["persistent"])
            if state.step in (LOST_AT, STEPS):
                print(f"generation {now.number} size {now.size} persistent {persistent}", flush=True)
            if state.step % 3 == 0:
                state.commit()

    train(state)
    averages = -RATE * sum((size + 1) / 2 for size in state.history)
    adasums = -RATE * sum(ADASUM[size] for size in state.history)
    for kind, (model, _) in trained.items():
        expected = adasums if kind == "adasum" else averages
        for weight in model.state_dict().values():  # with the updates that wait for the next forward
            gathered = hvd.allgather(weight.reshape(1, -1))
            assert all(torch.equal(gathered[0], one) for one in gathered), f"{kind}: the ranks differ"
            close = 0.2 if kind == "topk" else 1e-4  # what it has not sent yet waits in the residuals
            assert torch.allclose(weight, torch.tensor(expected), rtol=close), (
                kind, expected, weight.min(), weight.max(), state.history,
            )  # fmt: skip
    nothing_is_negotiated({kind: trained[kind] for kind in ("plain", "fp16")})
    if hvd.rank() == 0:
        print(f"sets {both.ranks} autotune {hvd.metrics()['autotune']}", flush=True)
        print(f"done {len(state.history)} sizes {sorted(set(state.history))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
