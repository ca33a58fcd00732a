"""A small resources server with the endpoints of NeMo Gym: a counter for each session, which the verifier reads."""

import argparse
import json
import uuid

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

COUNTERS: dict[str, int] = {}


async def seed_session(request):
    body, session = await request.json(), uuid.uuid4().hex
    COUNTERS[session] = body["initial_count"]
    response = JSONResponse({})
    response.set_cookie("session", session)
    return response


async def increment(request):
    body = await request.json()
    if not isinstance(body.get("count"), int):
        return JSONResponse({"detail": "count: not an integer"}, 422)
    COUNTERS[request.cookies["session"]] += body["count"]
    return JSONResponse({"success": True})


async def verify(request):
    body = await request.json()
    *items, last = body["response"]["output"]
    calls = [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"]
    text = last["content"][0]["text"]
    right = COUNTERS[request.cookies["session"]] == body["expected_count"] == int(text)
    reward = float(right and len(calls) == len(items) / 2)
    return JSONResponse({**body, "reward": reward})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    handlers = (seed_session, increment, verify)
    routes = [Route(f"/{handler.__name__}", handler, methods=["POST"]) for handler in handlers]
    uvicorn.run(Starlette(routes=routes), port=parser.parse_args().port, log_level="error")
