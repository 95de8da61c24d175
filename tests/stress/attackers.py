"""The attacks of attack_server.py: grammar bombs, long texts, unread streams, silent connections, malformed bodies.

Every attacker has an address of its own (127.0.0.2 and up), so that the server can tell them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import Counter
from typing import TYPE_CHECKING

import httpx
from server_process import Json

if TYPE_CHECKING:
    from hostile_sound import Sounds


class Attack:
    """Runs until told to stop; what the server answered is counted."""

    KINDS = ("bombs", "ambiguous", "long_texts", "unread", "silent", "malformed", "wrong_lists", "odd_heads", "leavers")
    CLIENTS = {"bombs": 2, "images": 3, "sound": 3}  # noqa: RUF012  # one of each other kind

    def __init__(self, port: int, stop: asyncio.Event, many: int, kinds: list[str]) -> None:
        self.port = port
        self.stop = stop
        self.many = many
        self.kinds = kinds
        self.counts: Counter[str] = Counter()
        self._address = 1
        self._images: tuple[list[str], ...] = ()
        self._sounds: Sounds | None = None

    def address(self) -> str:
        self._address += 1
        return f"127.0.0.{self._address}"

    def names(self) -> dict[str, str]:
        """Which attack an address belongs to: each client takes its own in this order."""
        each = (kind for kind in self.kinds for _ in range(self.CLIENTS.get(kind, 1)))
        return {"127.0.0.1": "the client"} | {f"127.0.0.{i}": kind for i, kind in enumerate(each, 2)}

    def tasks(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(getattr(self, kind)()) for kind in list(self.names().values())[1:]]

    def client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(local_address=self.address())
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=60, transport=transport)

    async def post(self, client: httpx.AsyncClient, name: str, path: str, **how: object) -> None:
        try:
            answer = await client.post(path, **how)  # type: ignore[arg-type]
            self.counts[f"{name}: {answer.status_code}"] += 1
            if answer.status_code == 429:
                await asyncio.sleep(0.1)
        except httpx.HTTPError as e:
            self.counts[f"{name}: {type(e).__name__}"] += 1

    async def bombs(self) -> None:
        rng = random.Random(1)
        async with self.client() as client:
            while not self.stop.is_set():
                odd = rng.randrange(10**7, 10**8) | 1
                chain = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "null"}]} for i in range(2000)}
                schema: Json = rng.choice(
                    [
                        {"type": "integer", "multipleOf": odd},
                        {"$defs": {**chain, "a2000": {"const": odd}}, "$ref": "#/$defs/a0"},
                        {"enum": [f"{odd} {i}" for i in range(8000)]},
                        {"type": "string", "pattern": f"^(a|b|{odd})*c(a|b){{40}}$"},
                    ]
                )
                body: Json = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
                if rng.random() < 0.5:
                    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
                else:
                    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
                    body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
                await asyncio.gather(
                    *(self.post(client, "grammar bomb", "/v1/chat/completions", json=body) for _ in range(3))
                )

    async def ambiguous(self) -> None:
        """Compiles in no time, and each mask takes longer than the one before."""
        rng = random.Random(5)
        async with self.client() as client:
            while not self.stop.is_set():
                # another each time: none is known
                grammar = f'root ::= e\ne ::= e e | [a-z ] | "" | "{rng.randrange(10**6)}"'
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "grammar": grammar}
                await self.post(client, "ambiguous", "/v1/chat/completions", json=body)

    async def wrong_lists(self) -> None:
        """Each item is wrong, or one of very many."""
        ones = b"1," * 2_000_000 + b"1"
        keys = b",".join(b'"%x":"a"' % i for i in range(350_000))
        message = b'{"messages":[{"role":"user","content":'
        bodies = [
            ("/v1/completions", b'{"prompt":"x","stop":[' + ones + b"]}"),
            ("/v1/chat/completions", message + b"[" + ones + b"]}]}"),
        ]
        bodies += [
            ("/v1/completions", b'{"prompt":"x","logit_bias":{' + keys + b"}}"),
            ("/detokenize", b'{"tokens":["",' + ones + b"]}"),
        ]
        bodies += [("/api/show", b'{"model":[' + ones + b"]}"), ("/v1/completions", b'{"prompt":"x",' + keys + b"}")]
        async with self.client() as client:
            while not self.stop.is_set():
                for path, body in bodies:
                    await self.post(
                        client, "wrong list", path, content=body, headers={"Content-Type": "application/json"}
                    )

    async def odd_heads(self) -> None:
        """Two lengths with 4 MB behind them, one half closed, another address with each request."""
        address = self.address()
        numbers = iter(range(10**9))
        text = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":4}'
        kind = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        two = kind + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n3d0900\r\n" + b"x" * 0x3D0900
        while not self.stop.is_set():
            forged = f"X-Forwarded-For: 10.0.{next(numbers) % 250}.1\r\nContent-Length: {len(text)}\r\n\r\n".encode()
            for name, data in (("two lengths", two), ("invented address", kind + forged + text)):
                connection = await self.connect(address, data)
                if connection is not None:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)
                    await asyncio.sleep(0.05)
                    connection.close()
                    self.counts[name] += 1

    async def long_texts(self) -> None:
        body = {"prompt": "1" * 4_100_000, "max_tokens": 1}
        fitting = {"prompt": "1 " * 20_000, "max_tokens": 1}
        async with self.client() as client:
            while not self.stop.is_set():
                await asyncio.gather(
                    *(self.post(client, "long text", "/v1/completions", json=b) for b in [body] * 8 + [fitting] * 4)
                )
                await asyncio.sleep(0.2)

    async def unread(self) -> None:
        """Streams with everything in them, and nobody reads."""
        body = {
            "messages": [{"role": "user", "content": "Count."}],
            "n": 8,
            "stream": True,
            "max_tokens": 2000,
            "ignore_eos": True,
        }
        text = json.dumps({**body, "logprobs": True, "top_logprobs": 20}).encode()
        kind = "Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{kind}Content-Length: {len(text)}\r\n\r\n"
        address = self.address()
        while not self.stop.is_set():
            connection = await self.connect(address, head.encode() + text)
            if connection is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), 15)
                connection.close()
                self.counts["unread stream"] += 1

    async def silent(self) -> None:
        address = self.address()
        half_body = b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
        kinds = [b""] * 3 + [b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127"] * 3 + [half_body]
        open_ones: list[socket.socket] = []
        while not self.stop.is_set():
            for data in kinds:
                connection = await self.connect(address, data)
                if connection is not None:
                    open_ones.append(connection)
                    self.counts["silent connection"] += 1
            while len(open_ones) > self.many:
                open_ones.pop(0).close()
            await asyncio.sleep(0.05)
        for connection in open_ones:
            connection.close()

    async def connect(self, address: str, data: bytes) -> socket.socket | None:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            connection.bind((address, 0))
            await asyncio.wait_for(loop.sock_connect(connection, ("127.0.0.1", self.port)), 10)
            await asyncio.wait_for(loop.sock_sendall(connection, data), 10)
            return connection
        except (OSError, TimeoutError):
            connection.close()
            self.counts["connection refused or reset"] += 1
            await asyncio.sleep(0.1)
            return None

    async def malformed(self) -> None:
        bodies = [b'{"model":"\\ud800","messages":[]}', b"[" * 100_000, b"{", b'"x"', b"\xff"]
        bodies.append(b'{"messages":[{"role":"user","content":"x"}],"foo":1}')
        async with self.client() as client:
            while not self.stop.is_set():
                for body in bodies:
                    await self.post(
                        client,
                        "malformed",
                        "/v1/chat/completions",
                        content=body,
                        headers={"Content-Type": "application/json"},
                    )
                await self.post(
                    client, "malformed", "/v1/chat/completions", content="hello", headers={"Content-Type": "text/plain"}
                )
                await asyncio.sleep(0.1)

    async def images(self) -> None:
        from hostile_images import bodies, large, small

        if not self._images:
            self._images = (small(), large())
        async with self.client() as client:
            requests = bodies(random.Random(self._address), *map(list, self._images))
            while not self.stop.is_set():
                name, body = next(requests)
                await self.post(client, name, "/v1/chat/completions", json=body)

    async def sound(self) -> None:
        from hostile_sound import all_sounds, requests

        if self._sounds is None:
            self._sounds = all_sounds()
        async with self.client() as client:
            stream = requests(random.Random(self._address), self._sounds)
            while not self.stop.is_set():
                request = next(stream)
                await self.post(client, request.name, request.path, **request.options)

    async def scored(self) -> None:
        """Texts to embed and prompts to score, several at once."""
        texts = {"input": "red fox " * 700}
        prompt = {"prompt": "red fox " * 300, "max_tokens": 1, "prompt_logprobs": 1}
        requests = [("/v1/embeddings", texts), ("/v1/completions", prompt)] * 3
        async with self.client() as client:
            while not self.stop.is_set():
                await asyncio.gather(*(self.post(client, "scored", path, json=body) for path, body in requests))

    async def leavers(self) -> None:
        """Ask for something and go."""
        rng = random.Random(3)
        async with self.client() as client:
            while not self.stop.is_set():
                body = {
                    "messages": [{"role": "user", "content": "Tell me a story."}],
                    "max_tokens": 200,
                    "stream": rng.random() < 0.5,
                }
                with contextlib.suppress(httpx.HTTPError):
                    await client.post("/v1/chat/completions", json=body, timeout=rng.choice([0.05, 0.3]))
                self.counts["left early"] += 1
                await asyncio.sleep(0.1)
