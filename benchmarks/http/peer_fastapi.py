"""FastAPI under uvicorn with uvloop and httptools."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Message(BaseModel):
    """One turn."""

    role: str
    content: str


class Body(BaseModel):
    """What wrk sends."""

    messages: list[Message]
    max_tokens: int


app = FastAPI()


@app.post("/v1/chat/completions")
async def answer(body: Body) -> dict[str, str]:
    """Answer 300 bytes."""
    return {"text": "y" * 300}


uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", loop="uvloop", http="httptools")
