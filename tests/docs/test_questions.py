"""Questions that users ask, and the words on a page that answer each: whoever shortens a page keeps them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {
    "How do I install it?": ("start.md", r"pip install '\./horoclone-source\[torch\]'"),
    "Where do I get it?": ("start.md", r"git clone"),
    "Which versions of Python and torch work?": ("start.md", r"- torch: 2\.4\.0"),
    "What do I change in a PyTorch script?": ("start.md", r"hvd\.DistributedOptimizer\("),
    "How do I start it on two hosts?": ("launching.md", r"horoclonerun -np 8 -H node1:4,node2:4"),
    "How do I start it under Slurm?": ("launching.md", r"srun -n 4"),
    "How do I start it from Python?": ("launching.md", r"horoclone\.run\("),
    "How do I use it in a notebook?": ("notebooks.md", r"horoclone\.run\("),
    "I have DDP: what is the shortest way?": ("from_ddp.md", r'init_process_group\("horoclone"\)'),
    "What replaces no_sync()?": ("from_ddp.md", r"no_sync\(\)` \| `backward_passes_per_step"),
    "Is allreduce a sum or a mean?": ("from_ddp.md", r"returns the \*mean\* in a new tensor"),
    "My keys begin with module.": ("from_ddp.md", r'removeprefix\("module\."\)'),
    "Does my Horovod script run?": ("from_horovod.md", r"import horovod\.torch as hvd` work"),
    "Where is the command horovodrun?": ("from_horovod.md", r"\./packages/horovodrun"),
    "What differs from Horovod?": ("from_horovod.md", r"## What is different, on purpose"),
    "Do I have to scale the learning rate?": (
        "start.md",
        r"learning rate is multiplied by the number of ranks",
    ),
    "How do I clip gradients?": ("optimizer.md", r"clip_grad_norm_"),
    "Does torch.amp work?": ("optimizer.md", r"GradScaler"),
    "How do I accumulate gradients?": ("optimizer.md", r"backward_passes_per_step"),
    "How do I shard the optimizer's state?": ("optimizer.md", r"shard_optimizer_state=True"),
    "Batches have different sizes": ("optimizer.md", r"set_weight"),
    "Ranks have different numbers of batches": ("uneven_data.md", r"hvd\.join\(\)"),
    "How do I evaluate?": ("evaluation.md", r"EvaluationSampler"),
    "It hangs": ("hangs.md", r"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
    "Only rank 0 called a collective": ("errors.md", r"each waits for a call"),
    "What does PeerLost mean?": ("errors.md", r"## PeerLost"),
    "It takes the wrong network interface": ("connections.md", r"--network-interfaces eth0"),
    "Connection refused": ("connections.md", r"connection refused"),
    "Bus error, /dev/shm is full": ("shared_memory.md", r"--shm-size"),
    "What survives the loss of a rank, and how do I write it?": ("elastic.md", r"@hvd\.elastic\.run"),
    "How do I react to a spot instance's notice?": ("elastic.md", r"--notice-script"),
    "What do I do at a time limit of Slurm?": ("slurm.md", r"HOROCLONE_NOTICE_SIGNAL=USR1"),
    "How do I save checkpoints?": ("checkpoints.md", r"hvd\.checkpoint\.save\("),
    "How do I see what a job does?": ("observing.md", r"horoclone top"),
    "Which rank is slow, and why?": ("observing.md", r"horoclonerun --why"),
    "How do I get its figures into Prometheus?": ("observing.md", r"--metrics-port"),
    "How do I send fewer bytes?": ("compression.md", r"Compression\.int8"),
    "Does it run on GPUs, and was that tested?": ("gpu.md", r"Nothing was run or measured on a GPU"),
    "How fast is it, beside gloo and Open MPI?": (
        "performance.md",
        r"\| 16 MiB \| 3\.14 ms \| 4\.42 ms; .* \| 18\.7 ms",
    ),
    "Is traffic encrypted?": ("launching.md", r"encrypts nothing"),
    "How many processes may join or leave on Kubernetes?": ("kubernetes.md", r"HOROCLONE_MIN_NP"),
    "Which settings are there?": ("environment.md", r"HOROCLONE_LOG_LEVEL"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_on_its_page(question: str) -> None:
    page, answer = QUESTIONS[question]
    assert re.search(answer, (ROOT / "docs" / page).read_text()), f"docs/{page} no longer has {answer!r}"
