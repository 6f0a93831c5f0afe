"""Processes behind one DNS name: which number each has, where they meet, and what contradicts itself."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from horoclone import errors
from horoclone.bootstrap import service

POD = {"HOROCLONE_SERVICE": "train.", "HOROCLONE_HOSTNAME": "train-2", "HOROCLONE_SIZE": "4"}


def test_a_pod_knows_its_number_and_where_the_first_one_is() -> None:
    place = service.place_of(POD)
    assert (place.index, place.size, place.is_first, place.job) == (2, 4, False, "train")
    assert place.first == "train-0.train" and place.host_of(11) == "train-11"
    assert service.why(place) == "HOROCLONE_SERVICE=train is set, and this is process 2 of 4"
    indexed = service.place_of({**POD, "JOB_COMPLETION_INDEX": "2", "HOROCLONE_JOB": "uid"})
    assert indexed.index == 2 and indexed.job == "uid"
    assert service.place_of({**POD, "HOROCLONE_HOSTNAME": "train-0"}).is_first


def test_without_a_name_it_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "web-7-3.cluster.local")
    place = service.place_of({"HOROCLONE_SERVICE": "web", "HOROCLONE_SIZE": "4"})
    assert place.index == 3 and place.first == "web-7-0.web"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"HOROCLONE_HOSTNAME": "train"}, "'train', does not end in the number of this process"),
        ({"HOROCLONE_HOSTNAME": "7"}, "'7', does not end in the number"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1, but this host is train-2"),
        ({"JOB_COMPLETION_INDEX": "two"}, "JOB_COMPLETION_INDEX='two' is not a whole number"),
        ({"HOROCLONE_SIZE": ""}, "HOROCLONE_SIZE is not set: to how many processes"),
        ({"HOROCLONE_SIZE": "4.5"}, "HOROCLONE_SIZE='4.5' is not a whole number"),
        ({"HOROCLONE_SIZE": "2"}, "host train-2 is not below HOROCLONE_SIZE=2"),
        ({"HOROCLONE_SIZE": "0", "HOROCLONE_ELASTIC": "1"}, "is not below HOROCLONE_SIZE=0"),
    ],
)
def test_a_number_that_is_missing_or_contradicts_another_is_told(more: dict[str, str], text: str) -> None:
    with pytest.raises(errors.Unsupported) as raised:
        service.place_of({**POD, **more})
    assert text in str(raised.value)


def test_an_elastic_job_may_grow_beyond_its_first_size() -> None:
    assert service.place_of({**POD, "HOROCLONE_SIZE": "2", "HOROCLONE_ELASTIC": "1"}).index == 2


def test_a_launcher_comes_before_a_service() -> None:
    assert service.is_set(POD) and not service.is_set({**POD, "HOROCLONE_RENDEZVOUS": "host:1"})
    assert not service.is_set({}) and not service.is_elastic(POD)
    assert service.is_elastic({**POD, "HOROCLONE_ELASTIC": "1"})


def test_all_processes_of_a_job_take_the_same_port_whatever_their_secrets() -> None:
    place, other = service.place_of(POD), service.place_of({**POD, "HOROCLONE_HOSTNAME": "train-1"})
    port = place.port({"HOROCLONE_SECRET": "a"})
    assert port == other.port({"HOROCLONE_SECRET": "b"}) and 0 < port < 65536
    assert service.place_of({**POD, "HOROCLONE_JOB": "another"}).port({}) != port
    assert place.port({"HOROCLONE_PORT": " 4321 "}) == 4321
    assert service.rendezvous_of({**POD, "HOROCLONE_PORT": "4321"}) == ("train-0.train", [4321])
    for wrong in ("0", "65536", "http", "-1"):
        with pytest.raises(errors.Unsupported, match="is not the number of a port"):
            place.port({"HOROCLONE_PORT": wrong})


def test_bounds_fit_together() -> None:
    place = service.place_of(POD)
    assert service.bounds_of(place, {}) == service.Bounds(1, None, 600.0, True)
    given = {"HOROCLONE_MIN_NP": "2", "HOROCLONE_MAX_NP": "8", "HOROCLONE_ELASTIC_QUORUM": "any"}
    found = service.bounds_of(place, {**given, "HOROCLONE_ELASTIC_TIMEOUT": "5"})
    assert found == service.Bounds(2, 8, 5.0, False)
    for wrong in ({"HOROCLONE_MIN_NP": "5"}, {"HOROCLONE_MAX_NP": "3"}, {"HOROCLONE_MIN_NP": "0"}):
        with pytest.raises(errors.Unsupported, match="does not hold"):
            service.bounds_of(place, wrong)
    with pytest.raises(errors.Unsupported, match="'most' is neither majority nor any"):
        service.bounds_of(place, {"HOROCLONE_ELASTIC_QUORUM": "most"})


def test_without_a_secret_nobody_meets() -> None:
    place = service.place_of(POD)
    with pytest.raises(errors.Unsupported, match=r"process 2 of 4.*HOROCLONE_SECRET_FILE"):
        service.secret_of(place, {})
    assert service.secret_of(place, {"HOROCLONE_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"


def test_a_name_that_nobody_has_yet_is_no_error_and_a_resolver_that_fails_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def says(answer: Any) -> None:
        def getaddrinfo(*_: Any) -> Any:
            if isinstance(answer, OSError):
                raise answer
            return [(0, 0, 0, "", (one, 0)) for one in answer]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    says(["10.0.0.2", "10.0.0.1", "10.0.0.2"])
    assert service.addresses("train") == ["10.0.0.1", "10.0.0.2"]
    says(socket.gaierror(socket.EAI_NONAME, "no such name"))
    assert service.addresses("train") == []
    says(socket.gaierror(socket.EAI_AGAIN, "try again"))
    with pytest.raises(OSError, match="try again"):
        service.addresses("train")
