"""Forks beside gradients that lie in memory which other ranks read: a child's writes stay its own."""

from __future__ import annotations

import os

import torch
from world import ranks

import horoclone.torch as hvd


def equal_weights(values):
    assert values[0] == values[1]


@ranks(2, check=equal_weights)
def test_data_loaders_and_forks_leave_shared_gradients_alone():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    data = torch.utils.data.TensorDataset(torch.arange(256.0).reshape(4, 64))
    for epoch in range(3):
        loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)  # forked anew in every epoch
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch / 256 + hvd.rank()).square().sum().backward()
            optimizer.step()
        before = model.weight.grad.clone()
        pid = os.fork()
        if pid == 0:
            same = torch.equal(model.weight.grad, before)
            model.weight.grad.fill_(1e9)
            os._exit(0 if same else 1)
        assert os.waitpid(pid, 0)[1] == 0, f"the child of epoch {epoch} saw other gradients"
        assert torch.equal(model.weight.grad, before), f"the child of epoch {epoch} wrote into ours"
    return model.weight.detach().flatten().tolist()
