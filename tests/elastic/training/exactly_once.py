"""A script for test_jobs.py: two epochs over 300 samples; the process that starts as rank 1 ends once, as it is told.

argv: the signal, a file that is made before it is sent, and the loader: "plain", or how many workers a
StatefulDataLoader of torchdata has. Rank 0 prints how many samples each epoch had.
"""

import os
import sys
import time

import torch

import horoclone.torch as hvd


def main(how: int, mark: str, kind: str) -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2)
    sampler = hvd.elastic.ElasticSampler(range(300), seed=1)
    if kind == "plain":
        where = {"sampler": sampler}
        loader = torch.utils.data.DataLoader(range(300), 2, sampler=sampler)
    else:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(range(300), 2, sampler=sampler, num_workers=int(kind))
        where = {"loader": loader}
    state = hvd.elastic.TorchState(model=model, epoch=0, seen=[], **where)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        print(f"generation {hvd.elastic.generation().number} of {hvd.size()}", flush=True)
        while state.epoch < 2:
            for index, samples in enumerate(loader):
                if os.environ["HOROVOD_RANK"] == "1" and index == 20 and not os.path.exists(mark):
                    open(mark, "w").close()
                    os.kill(os.getpid(), how)
                with torch.no_grad():
                    model.weight += hvd.allreduce(samples.float().mean() / 300, name="step")
                if kind == "plain":
                    sampler.record_batch(index, len(samples))
                state.seen = state.seen + hvd.allgather(samples).tolist()
                time.sleep(0.005)
                if index % 3 == 2:
                    state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: {len(state.seen)} {len(set(state.seen))}", flush=True)
            state.epoch, state.seen = state.epoch + 1, []
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    weights = hvd.allgather(model.weight.detach()[None])
    if hvd.rank() == 0:
        print("the same" if all(torch.equal(weights[0], one) for one in weights) else weights, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
