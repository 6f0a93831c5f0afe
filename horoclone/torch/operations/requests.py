"""This binding's requests to the core, which horoclone/requests.py builds, with their spans in torch's profiler.

`dtype` is what tensors.number_of() returns, also with ON_GPU in it.
"""

from __future__ import annotations

from horoclone.requests import Requests
from horoclone.torch.operations.spans import opened
from horoclone.torch.operations.tensors import address_of

_requests = Requests(address_of, opened)
submit, submit_group, run = _requests.submit, _requests.submit_group, _requests.run
