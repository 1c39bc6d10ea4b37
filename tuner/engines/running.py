"""A server that somebody else started: what it says of itself, by the pages of our engine, of vLLM, or none at all."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from time import perf_counter
from typing import Any

from pydantic import ValidationError

from tuner.bench_answer import UNKNOWN_ENGINE, ServerFacts
from tuner.engine_config import EngineConfig
from tuner.engines.vllm_config import parameters
from tuner.inputs import InputError
from tuner.load.connection import Endpoint, Exchange, connect
from tuner.measure.memory import EngineMemory
from tuner.measure.prometheus import parse_snapshot, read_infos, read_memory_bytes

ANSWER_S = 10.0
"""A page takes no longer than that. Unit: seconds."""

RESET_S = 60.0
"""Resetting a prefix cache waits for an engine's step. Unit: seconds."""

_IN_USE = "the server had requests in flight"
_ASK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server to measure."""

    endpoint: Endpoint
    facts: ServerFacts
    memory: EngineMemory


async def discover(endpoint: Endpoint, *, model: str | None) -> Server:
    """Ask a server who it is.

    Args:
        model: the name to measure; None takes the only one there is.

    Raises:
        InputError: where it cannot be reached, refuses to talk, or does not serve that model, or several.
    """
    card = _chosen(endpoint, await _cards(endpoint), model)
    page = await _text(endpoint, "/metrics") or ""
    metrics = parse_snapshot(page, at_s=0.0)
    config = await _told_config(endpoint, page)
    length = card.get("max_model_len")
    version = (await _json(endpoint, "/version")).get("version")
    labels = next(iter(read_infos(page, "engine:config_info")), {})
    has_metrics = None not in (metrics.running, metrics.waiting, metrics.kv_cache_usage, metrics.preemptions)
    facts = ServerFacts(
        url=endpoint.url,
        model=str(card["id"]),
        engine=_engine(card, page, is_ours=bool(labels)),
        version=version if isinstance(version, str) else None,
        device=labels.get("device"),
        simulated=labels.get("executor") == "simulated",
        max_model_len=length if isinstance(length, int) else None,
        config=config,
        fence=None if config is None else config.fence,
        has_metrics=has_metrics,
        num_in_flight=None if not has_metrics else (metrics.running or 0) + (metrics.waiting or 0),
    )
    return Server(endpoint=endpoint, facts=facts, memory=_memory(page))


async def reset_prefix_cache(endpoint: Endpoint, *, patience_s: float = 0.0) -> str | None:
    """Empty the server's prefix cache; returns why that was not done, None where it was.

    Args:
        patience_s: how long to go on asking a server that still has requests, such as those just hung up on.
    """
    until_s = perf_counter() + patience_s
    while True:
        why_not = await _reset_once(endpoint)
        if why_not != _IN_USE or perf_counter() >= until_s:
            return why_not
        await asyncio.sleep(_ASK_AGAIN_S)


async def _reset_once(endpoint: Endpoint) -> str | None:
    try:
        exchange = await exchange_once(endpoint, endpoint.post_json("/reset_prefix_cache", b""), timeout_s=RESET_S)
    except OSError as error:
        return str(error) or type(error).__name__
    if not exchange.succeeded:
        return exchange.fault or f"HTTP {exchange.status}"
    answer = _parsed(exchange.body)
    return _IN_USE if isinstance(answer, dict) and answer.get("success") is False else None


async def exchange_once(endpoint: Endpoint, payload: bytes, *, timeout_s: float) -> Exchange:
    """Send a request on a connection of its own and take its whole answer.

    Raises:
        OSError: where there is no connection, or no whole answer in time (`TimeoutError`).
    """
    connection = await connect(endpoint)
    try:
        async with asyncio.timeout(timeout_s):
            exchange, done = connection.start(payload, intended_s=perf_counter())
            await done
    finally:
        connection.abort()
    return exchange


async def _cards(endpoint: Endpoint) -> list[dict[str, Any]]:
    where = f"{endpoint.url}/v1/models"
    try:
        exchange = await exchange_once(endpoint, endpoint.get("/v1/models"), timeout_s=ANSWER_S)
    except OSError as error:
        said = str(error) or "none in time"
        raise InputError(f"{where}: no answer ({said}): start the server, or mend the address") from None
    if exchange.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise InputError(
            f"{where}: HTTP {exchange.status}: put the key into a variable and name it: --api-key-env NAME"
        )
    answer = _parsed(exchange.body)
    cards = answer.get("data") if exchange.succeeded and isinstance(answer, dict) else None
    found = [card for card in cards if isinstance(card, dict) and "id" in card] if isinstance(cards, list) else []
    if not found:
        said = exchange.fault or f"HTTP {exchange.status}"
        raise InputError(f"{where}: {said}, and no list of models: this is no OpenAI-compatible server")
    return found


def _chosen(endpoint: Endpoint, cards: list[dict[str, Any]], model: str | None) -> dict[str, Any]:
    names = [str(card["id"]) for card in cards]
    if model is None and len(cards) > 1:
        raise InputError(f"{endpoint.url} serves {len(cards)} models, name one with --model: {', '.join(names)}")
    if model is not None and model not in names:
        raise InputError(f"{endpoint.url} does not serve --model {model}: it has {', '.join(names)}")
    return cards[0 if model is None else names.index(model)]


def _engine(card: dict[str, Any], page: str, *, is_ours: bool) -> str:
    if is_ours:
        return "builtin"
    if read_infos(page, "vllm:cache_config_info"):
        return "vllm"
    owner = card.get("owned_by")
    return owner if isinstance(owner, str) and owner else UNKNOWN_ENGINE


async def _told_config(endpoint: Endpoint, page: str) -> EngineConfig | None:
    """The engine config in force, None where it is not told whole."""
    labels = next(iter(read_infos(page, "engine:config_info")), None)
    if labels is not None:
        return _as_config(labels)
    info = await _json(endpoint, "/server_info?config_format=json")
    config = info.get("vllm_config")
    return _as_config(parameters(config)) if isinstance(config, dict) else None


def _as_config(told: dict[str, Any]) -> EngineConfig | None:
    known = {name: told[name] for name in EngineConfig.model_fields if told.get(name) not in (None, "None")}
    try:
        return EngineConfig.model_validate(known)
    except ValidationError:
        return None


def _memory(page: str) -> EngineMemory:
    """Where our engine says its memory goes; another says nothing of it."""
    parts = read_memory_bytes(page)
    return EngineMemory(
        requested_bytes=parts.get("requested"),
        weights_bytes=parts.get("weights"),
        activation_peak_bytes=parts.get("activation_peak"),
        kv_cache_bytes=parts.get("kv_cache"),
    )


async def _text(endpoint: Endpoint, path: str) -> str | None:
    """A page, None where the server has none to give."""
    try:
        exchange = await exchange_once(endpoint, endpoint.get(path), timeout_s=ANSWER_S)
    except OSError:
        return None
    return exchange.body.decode(errors="replace") if exchange.succeeded else None


async def _json(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """A JSON object, empty where the server has none to give."""
    answer = _parsed((await _text(endpoint, path) or "").encode())
    return answer if isinstance(answer, dict) else {}


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return None
