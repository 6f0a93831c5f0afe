"""A device between two hosts that changes one bit and makes TCP's sum right again, as faulty cards and switches do."""

from __future__ import annotations

import secrets
import select
import socket
import struct
import threading

from namespaces import connect, delete, enter_namespace, lay_cable, make

IP, TCP, UDP = b"\x08\x00", 6, 17


def sum_of(data: bytes) -> int:
    """The internet checksum (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) // 2 * 2]))
    total += data[-1] << 8 if len(data) % 2 else 0
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Device:
    """Carries frames between two hosts, which are namespaces, from a third one."""

    def __init__(self) -> None:
        tag, third = secrets.token_hex(3), secrets.randbelow(250)
        self.names = [f"hc-{tag}-{side}" for side in "abm"]
        self.addresses = [f"10.217.{third}.{host}" for host in (1, 2)]
        self.changed: list[tuple[int, int, int]] = []
        self.left_alone = 0  # a port
        self._wanted: list[int] | None = None
        self._behind: dict[bytes, int] = {}  # of each stream: the number behind what has come
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry)

    def open(self) -> None:
        make(*self.names)
        for host, address in enumerate(self.addresses):
            name, port = self.names[host], f"port{host}"
            lay_cable(name, "cable", self.names[2], port)
            connect(name, "cable", f"{address}/24", "gso_max_segs", "1")  # frames as a wire has them
            connect(self.names[2], port)
        self._thread.start()

    def change(self, smallest: int, largest: int, skip: int, bit: int) -> None:
        """One bit of the payload that comes behind so many others of this size."""
        self._wanted = [smallest, largest, skip, bit]

    def close(self) -> None:
        self._over.set()
        if self._thread.ident:
            self._thread.join(10)
        delete(*self.names)

    def _carry(self) -> None:
        enter_namespace(self.names[2])
        ports = []
        for host in (0, 1):
            port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            port.bind((f"port{host}", 0))
            ports.append(port)
        while not self._over.is_set():
            for port in select.select(ports, [], [], 0.1)[0]:
                frame, where = port.recvfrom(70_000)
                if where[2] == socket.PACKET_OUTGOING:
                    continue
                if frame[12:14] == IP and frame[23] == TCP:
                    frame = self._passed(bytearray(frame))
                elif frame[12:14] == IP and frame[23] == UDP:
                    at = 14 + (frame[14] & 15) * 4 + 6  # no sum: the sender's card was to make it
                    frame = frame[:at] + b"\0\0" + frame[at + 2 :]
                ports[port is ports[0]].send(frame)
        for port in ports:
            port.close()

    def _passed(self, frame: bytearray) -> bytes:
        start = 14 + (frame[14] & 15) * 4
        end = 14 + int.from_bytes(frame[16:18], "big")
        payload = start + (frame[start + 12] >> 4) * 4
        size, wanted = end - payload, self._wanted
        ports = struct.unpack("!HH", frame[start : start + 4])
        # What is sent once more, and has come already, is not looked at by anybody.
        stream, sequence = bytes(frame[26 : start + 4]), int.from_bytes(frame[start + 4 : start + 8], "big")
        is_new = (sequence - self._behind.get(stream, sequence)) % (1 << 32) < 1 << 31
        if is_new:
            self._behind[stream] = sequence + size
        if wanted and is_new and self.left_alone not in ports and wanted[0] <= size <= wanted[1]:
            wanted[2] -= 1
            if wanted[2] < 0:
                self._wanted = None
                at = payload + wanted[3] // 8 % size
                frame[at] ^= 1 << wanted[3] % 8
                self.changed.append((size, at - payload, wanted[3] % 8))
        frame[start + 16 : start + 18] = b"\0\0"
        pseudo = bytes(frame[26:34]) + struct.pack("!BBH", 0, TCP, end - start)
        frame[start + 16 : start + 18] = struct.pack("!H", sum_of(pseudo + bytes(frame[start:end])))
        return bytes(frame[:end])
