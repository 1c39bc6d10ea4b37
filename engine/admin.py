"""Endpoints for whoever runs the server: what is in force, and a cache to be forgotten."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from engine.frontend import Frontend
from engine.protocol import ApiError
from engine.scheduler import SchedulerConfig
from engine.stats import engine_version

_LIBRARIES = ("torch", "numpy", "tokenizers", "safetensors", "aiohttp")


class Admin:
    """The endpoints of one server, under vLLM's names for its development mode."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def add_routes(self, app: web.Application) -> None:
        """Add the endpoints to an application."""
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/reset_prefix_cache", self.reset_prefix_cache)

    async def server_info(self, request: web.Request) -> web.Response:
        """GET /server_info: what was asked for, what is in force, each core's memory, and the versions, as JSON."""
        if (wanted := request.query.get("config_format", "json")) != "json":
            raise ApiError(400, f"config_format={wanted!r} is not json", param="config_format")
        return web.json_response(server_info(self._frontend))

    async def reset_prefix_cache(self, _request: web.Request) -> web.Response:
        """POST /reset_prefix_cache: answers when all cores have; `success` is false while requests hold blocks."""
        return web.json_response({"success": await self._frontend.reset_prefix_cache()})


def server_info(frontend: Frontend) -> dict[str, object]:
    """What `/server_info` says."""
    in_force = asdict(frontend.resolved)
    return {
        "asked": in_force.pop("asked"),
        "in_force": in_force,
        "cores": [
            {
                "engine": str(rank),
                "device": resolved.device,
                "num_gpu_blocks": resolved.num_gpu_blocks,
                "kv_block_bytes": resolved.kv_block_bytes,
                "memory": asdict(resolved.memory),
                "scheduler": asdict(SchedulerConfig.from_resolved(resolved)),
            }
            for rank, resolved in enumerate(frontend.core_configs)
        ],
        "versions": {
            "engine": engine_version(),
            "python": platform.python_version(),
            **{name: _version(name) for name in _LIBRARIES},
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
