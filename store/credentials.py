"""Credentials that are asked for again each time a connection is made, so that passwords rotate.

redis-py calls a `CredentialProvider` at each dial. Errors name the setting, and never show a
password. All methods run on the loop of the store.
"""

import asyncio
import importlib
import threading
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from redis.credentials import CredentialProvider

from store.errors import StoreUnavailable, StoreUrlError

LATE_SECONDS_MAX: Final = 5.0
"""How long an answer is used that came after its dial had given up: longer than the pause before
the next dial, far shorter than a token's life (15 minutes for ElastiCache's IAM tokens)."""
QUESTION_SECONDS_MAX: Final = 30.0
"""A provider that has not answered for so long is asked anew."""
Login = tuple[str] | tuple[str, str]
"""What a provider returns: a password, or a user and a password."""


def read_password(path: Path, setting: str) -> str:
    """The content of the file, without white space around it.

    Raises:
        StoreUnavailable: it cannot be read, or is empty. The message names the setting.
    """
    what = f"the file of setting {setting!r}, {path}"
    try:
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise StoreUnavailable(f"{what}, cannot be read: {why}") from error
    if not password:
        raise StoreUnavailable(f"{what}, is empty")
    return password


class PasswordFile(CredentialProvider):
    """The password that `path` holds at the moment of the dial, for `username`."""

    def __init__(self, path: Path, setting: str, username: str | None) -> None:
        self._path = path
        self._setting = setting
        self._username = username

    def get_credentials(self) -> Login:
        """As `read_password`; the next dial may work."""
        return _login(self._username, (read_password(self._path, self._setting),))

    async def get_credentials_async(self) -> Login:
        return self.get_credentials()

    def __str__(self) -> str:
        return f"the password is that of {self._path}"


class ProviderLogin(CredentialProvider):
    """The answer of a user's provider, which may take longer than a dial.

    A dial that gives up does not end the question: the next one takes its answer, unless that is
    older than LATE_SECONDS_MAX. A provider that only has `get_credentials` runs on a thread, since
    it may block.
    """

    def __init__(self, provider: CredentialProvider, username: str | None) -> None:
        self._provider = provider
        self._username = username
        self._question: asyncio.Task[Login] | None = None
        self._asked_at = 0.0
        self._answered_at = 0.0
        """When the last question was answered, by the loop's clock."""

    async def get_credentials_async(self) -> Login:
        """Raises StoreUnavailable: the provider failed."""
        question = self._question
        if question is None or self._is_over(question):
            question = self._question = asyncio.create_task(self._ask())
            question.add_done_callback(self._note_answer)
            self._asked_at = asyncio.get_running_loop().time()
        try:
            await asyncio.wait([question])
        finally:
            if question.done() and self._question is question:
                self._question = None
        if question.cancelled():  # another dial has given it up: this one was not cancelled
            raise StoreUnavailable(f"{self}, which does not answer")
        return question.result()

    async def close(self) -> None:
        """Give up the question that is open, if there is one."""
        if self._question is not None:
            self._question.cancel()
            await asyncio.gather(self._question, return_exceptions=True)

    def _is_over(self, question: "asyncio.Task[Login]") -> bool:
        """Whether it is no use to this dial: the answer is old, or will hardly come."""
        now = asyncio.get_running_loop().time()
        if question.done():
            return now > self._answered_at + LATE_SECONDS_MAX
        if now < self._asked_at + QUESTION_SECONDS_MAX:
            return False
        question.cancel()
        return True

    def _note_answer(self, question: "asyncio.Task[Login]") -> None:
        if not question.cancelled():
            self._answered_at = question.get_loop().time()
            question.exception()  # a dial that gave up does not fetch it

    async def _ask(self) -> Login:
        provider = self._provider
        try:
            if type(provider).get_credentials_async is CredentialProvider.get_credentials_async:
                answer = await _on_daemon_thread(provider.get_credentials)
            else:
                answer = await provider.get_credentials_async()
            return _login(self._username, answer)
        except Exception as error:  # of the user's code
            name = type(provider).__name__
            raise StoreUnavailable(
                f"the credential provider {name} failed: {type(error).__name__}: {error}"
            ) from error

    def __str__(self) -> str:
        return f"the password is that of the credential provider {type(self._provider).__name__}"


async def _on_daemon_thread(call: Callable[[], Login]) -> Login:
    """The result of `call`, on a thread that does not delay the end of the process.

    `asyncio.to_thread` would: the interpreter waits for the threads of its pool.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Login] = loop.create_future()

    def settle(answer: Login | None, error: BaseException | None) -> None:
        if answered.done():
            return
        if answer is not None:
            answered.set_result(answer)
        elif isinstance(error, Exception):
            answered.set_exception(error)
        else:  # a future takes no SystemExit
            answered.set_exception(RuntimeError(f"no answer: {error!r}"))

    def run() -> None:
        answer: Login | None = None
        error: BaseException | None = None
        try:
            answer = call()
        except BaseException as caught:  # noqa: BLE001 -- of the user's code; a dial waits for it
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, answer, error)

    threading.Thread(target=run, name="lb-credentials", daemon=True).start()
    return await answered


def load_provider(path: str) -> CredentialProvider:
    """The provider at `package.module:attribute`: an instance, or what makes one without arguments.

    Raises:
        StoreUrlError: nothing like that is there, or it fails.
    """
    what = f"the credential provider {path!r}"
    module, _, attribute = path.partition(":")
    try:
        found: Any = attrgetter(attribute)(importlib.import_module(module))
        provider = found if isinstance(found, CredentialProvider) else found()
    except Exception as error:  # of the user's code
        raise StoreUrlError(f"{what} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(provider, CredentialProvider):
        raise StoreUrlError(
            f"{what} is a {type(provider).__name__}; allowed: a redis.credentials."
            "CredentialProvider, or a class or function that makes one without arguments"
        )
    return provider


def _login(username: str | None, answer: Login) -> Login:
    """The answer, with `username` if it is a password alone."""
    if len(answer) == 1 and username is not None:
        return (username, answer[0])
    return answer
