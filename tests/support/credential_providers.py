"""Credential providers of users, for tests: each reads a file that its environment variable names.

The file is JSON, `[user, password]` or `[password]`, or `null` for a provider that fails.
"""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from redis.credentials import CredentialProvider

VARIABLE = "TEST_CREDENTIALS"
SLOW_SECONDS = 0.6


class Blocking(CredentialProvider):
    """It has the blocking method only."""

    asked = 0

    def get_credentials(self) -> Any:
        self.asked += 1
        login = json.loads(Path(os.environ[VARIABLE]).read_text())
        if login is None:
            raise ConnectionRefusedError("the token service is down")
        return tuple(login)


class Asynchronous(Blocking):
    async def get_credentials_async(self) -> Any:
        await asyncio.sleep(0.01)
        return self.get_credentials()


class Slow(Blocking):
    """As one that asks a service far away, and has no cache."""

    def get_credentials(self) -> Any:
        time.sleep(SLOW_SECONDS)
        return super().get_credentials()


class SlowAsynchronous(Asynchronous):
    async def get_credentials_async(self) -> Any:
        await asyncio.sleep(SLOW_SECONDS)
        return self.get_credentials()


AN_INSTANCE = Asynchronous()
NOT_A_PROVIDER = object


def make() -> CredentialProvider:
    return Asynchronous()


def fail() -> CredentialProvider:
    raise OSError("no metadata service")
