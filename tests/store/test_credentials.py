"""Passwords that change while a store is open: files and credential providers, on real servers."""

import asyncio
import json
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import credential_providers
from clusters import Sentinels, ValkeyCluster
from credential_providers import SLOW_SECONDS, VARIABLE, Blocking
from mirrors import Mirroring
from nodes import wait_until
from rotation import NEW, OLD, RIGHTS, USER, rotate, rotating_user
from servers import PATIENT_SECONDS, command, patient
from store import BlockingStore, EmbeddedServer, StoreUnavailable, StoreUrlError, open_store
from store.credentials import PasswordFile, ProviderLogin, load_provider
from store.testing.samples import a_location, a_record


@pytest.fixture
def server(valkey_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    with rotating_user(valkey_server) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{OLD}\n")
    return path


def url_of(server: EmbeddedServer, user: str = f"{USER}@") -> str:
    return server.url.replace("unix://", f"unix://{user}")


def test_a_file_is_read_at_each_connect(server: EmbeddedServer, file: Path, namespace: str) -> None:
    with patient(url_of(server), password_file=file) as store:
        assert store.locate(namespace, ["k"]) == [None]
        rotate(server, lambda: file.write_text(NEW))
        assert store.locate(namespace, ["k"]) == [None]


def test_the_mirror_survives_a_rotation(server: EmbeddedServer, file: Path, namespace: str) -> None:
    login = PasswordFile(file, "store_password_file", USER)
    with Mirroring(url_of(server), credentials=login) as mirroring:
        watching = mirroring.watch(namespace, "k")
        watching.wait(there=False)
        rotate(server, lambda: file.write_text(NEW))
        mirroring.store.publish(a_record(namespace, "k"), a_location())
        watching.wait(there=True)
        watching.cancel()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "the file of setting 'store_password_file', {}, cannot be read: No such file"),
        ("", "the file of setting 'store_password_file', {}, is empty"),
        ("\xff", "the file of setting 'store_password_file', {}, cannot be read: it is not text"),
        (NEW[:-3], "refuses the login: .*; the password is that of {}"),
    ],
)
def test_a_file_that_cannot_be_used_at_that_moment(
    server: EmbeddedServer, file: Path, namespace: str, content: str | None, words: str
) -> None:
    def spoil() -> None:
        file.unlink() if content is None else file.write_bytes(content.encode("latin-1"))

    with patient(url_of(server), password_file=file) as store:
        assert store.locate(namespace, ["k"]) == [None]
        rotate(server, spoil)
        with pytest.raises(StoreUnavailable, match=words.format(file)) as caught:
            store.locate(namespace, ["k"])
        said = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert OLD not in said
        assert NEW[:-3] not in said
        file.write_text(NEW)
        assert store.locate(namespace, ["k"]) == [None]


def test_a_file_for_the_default_user(start_server: object, tmp_path: Path, namespace: str) -> None:
    server = start_server()  # type: ignore[operator]
    assert command(server.url, "CONFIG", "SET", "requirepass", OLD) == b"+OK"
    file = tmp_path / "password"
    file.write_text(OLD)
    for options in ("", "?protocol=3"):
        with patient(server.url + options, password_file=file) as store:
            assert store.locate(namespace, ["k"]) == [None]


def test_a_file_comes_before_the_password_of_the_url(
    server: EmbeddedServer, file: Path, namespace: str
) -> None:
    with patient(url_of(server, f"{USER}:wrong@"), password_file=file) as store:
        assert store.locate(namespace, ["k"]) == [None]


def test_sentinels_and_servers_with_files_of_their_own(
    own_sentinels: Sentinels, tmp_path: Path, namespace: str
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text(OLD)
    theirs.write_text(OLD)
    everybody = [*own_sentinels.servers, *own_sentinels.sentinels]

    def on_all(*words: str) -> None:
        for one in everybody:
            own_sentinels.ask(one, *words)

    on_all("ACL", "SETUSER", USER, f">{OLD}", *RIGHTS)
    hosts = own_sentinels.url.partition("@")[2].partition("?")[0]
    url = f"redis-sentinel://{USER}@{hosts}?sentinel_username={USER}"
    with patient(url, password_file=ours, sentinel_password_file=theirs) as store:
        assert store.locate(namespace, ["k"]) == [None]
        on_all("ACL", "SETUSER", USER, f">{NEW}")
        ours.write_text(NEW)
        theirs.write_text(NEW)
        on_all("ACL", "SETUSER", USER, f"<{OLD}")
        on_all("CLIENT", "KILL", "USER", USER)
        assert answers(store, namespace)
        own_sentinels.fail_over()
        wait_until(lambda: answers(store, namespace), 10.0, "the store finds the new master")


def answers(store: BlockingStore, namespace: str) -> bool:
    try:
        return store.locate(namespace, ["k"]) == [None]
    except StoreUnavailable:
        return False


def test_all_servers_of_a_cluster(
    valkey_cluster: ValkeyCluster, file: Path, namespace: str
) -> None:
    masters = valkey_cluster.masters()

    def on_all(*words: str) -> None:
        for master in masters:
            master.command(*words)

    keys = [f"k{n}" for n in range(30)]
    on_all("ACL", "SETUSER", USER, f">{OLD}", *RIGHTS)
    url = valkey_cluster.url.replace("://", f"://{USER}@")
    with patient(url, password_file=file) as store:
        assert store.locate(namespace, keys) == [None] * 30
        on_all("ACL", "SETUSER", USER, f">{NEW}")
        file.write_text(NEW)
        on_all("ACL", "SETUSER", USER, f"<{OLD}")
        on_all("CLIENT", "KILL", "USER", USER)
        assert store.locate(namespace, keys) == [None] * 30
    on_all("ACL", "DELUSER", USER)


# ---- providers


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What the test's providers answer."""
    path = tmp_path / "login"
    monkeypatch.setenv(VARIABLE, str(path))
    path.write_text(json.dumps([USER, OLD]))
    return path


@pytest.mark.parametrize("attribute", ["Blocking", "Asynchronous", "AN_INSTANCE", "make"])
def test_a_provider_is_asked_at_each_connect(
    server: EmbeddedServer, login: Path, namespace: str, attribute: str
) -> None:
    provider = load_provider(f"credential_providers:{attribute}")
    with patient(server.url, credential_provider=provider) as store:
        assert store.locate(namespace, ["k"]) == [None]
        rotate(server, lambda: login.write_text(json.dumps([USER, NEW])))
        assert store.locate(namespace, ["k"]) == [None]


def test_a_provider_of_passwords_for_the_user_of_the_url(
    server: EmbeddedServer, login: Path, namespace: str
) -> None:
    login.write_text(json.dumps([OLD]))
    with patient(url_of(server), credential_provider=Blocking()) as store:
        assert store.locate(namespace, ["k"]) == [None]


def test_a_provider_that_fails(server: EmbeddedServer, login: Path, namespace: str) -> None:
    login.write_text("null")
    with patient(server.url, credential_provider=Blocking()) as store:
        words = "the credential provider Blocking failed: ConnectionRefusedError: the token service"
        with pytest.raises(StoreUnavailable, match=words):
            store.locate(namespace, ["k"])
        login.write_text(json.dumps([USER, "wrong-secret"]))
        with pytest.raises(StoreUnavailable, match=r"login: .*provider Blocking") as caught:
            store.locate(namespace, ["k"])
        assert "wrong-secret" not in "".join(traceback.format_exception(caught.value))
        login.write_text(json.dumps([USER, OLD]))
        assert store.locate(namespace, ["k"]) == [None]


@pytest.mark.parametrize("attribute", ["Slow", "SlowAsynchronous"])
def test_a_provider_that_takes_longer_than_a_dial(
    server: EmbeddedServer, login: Path, namespace: str, attribute: str
) -> None:
    """Its answer serves the dial that waits when it comes, or the next one."""
    provider = load_provider(f"credential_providers:{attribute}")
    assert isinstance(provider, Blocking)
    seconds = SLOW_SECONDS / 4
    with open_store(
        server.url,
        call_timeout_seconds=PATIENT_SECONDS,
        connect_timeout_seconds=seconds,
        credential_provider=provider,
    ) as store:
        dials = 1
        assert not answers(store, namespace)

        def answers_now() -> bool:
            nonlocal dials
            dials += 1
            return answers(store, namespace)

        wait_until(answers_now, 20.0)
        assert provider.asked < dials, "an answer served a later dial"


def test_a_store_closes_while_a_provider_is_asked(login: Path) -> None:
    async def open_and_close() -> int:
        loop, complaints = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        asking = ProviderLogin(credential_providers.SlowAsynchronous(), None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asking.get_credentials_async()
        await asking.close()
        assert len(asyncio.all_tasks()) == 1
        return len(complaints)

    assert asyncio.run(open_and_close()) == 0


def test_a_late_answer_is_not_kept(login: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a token that ends; and what failed once is no reason to fail later."""
    monkeypatch.setattr("store.credentials.LATE_SECONDS_MAX", 0.0)

    async def ask_twice(first: object) -> object:
        loop, complaints = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        login.write_text(json.dumps(first))
        asking = ProviderLogin(credential_providers.SlowAsynchronous(), None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asking.get_credentials_async()
        await asyncio.sleep(2 * SLOW_SECONDS)
        login.write_text(json.dumps([USER, NEW]))
        answer = await asking.get_credentials_async()
        await asking.close()
        assert complaints == []
        return answer

    assert asyncio.run(ask_twice([USER, OLD])) == (USER, NEW)
    assert asyncio.run(ask_twice(None)) == (USER, NEW)


class HangingOnce(Blocking):
    def __init__(self) -> None:
        self.released = threading.Event()

    def get_credentials(self) -> tuple[str]:
        if not self.asked:
            self.asked += 1
            self.released.wait()
        return (OLD,)


class Exiting(Blocking):
    def get_credentials(self) -> tuple[str]:
        raise SystemExit(3)


def test_a_provider_that_hangs_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.credentials.QUESTION_SECONDS_MAX", 0.1)

    async def ask_twice() -> object:
        provider = HangingOnce()
        asking = ProviderLogin(provider, USER)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asking.get_credentials_async()
        try:
            return await asyncio.wait_for(asking.get_credentials_async(), 10.0)
        finally:
            provider.released.set()

    assert asyncio.run(ask_twice()) == (USER, OLD)


def test_a_dial_that_gives_a_question_up_cancels_no_other_dial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several dials wait for one answer; a task that ends as cancelled is noticed by nobody."""
    monkeypatch.setattr("store.credentials.QUESTION_SECONDS_MAX", 0.1)

    async def ask_together() -> list[object]:
        provider = HangingOnce()
        asking = ProviderLogin(provider, USER)
        first = [asyncio.create_task(asking.get_credentials_async()) for _ in range(3)]
        await asyncio.sleep(0.2)
        try:
            answer = await asyncio.wait_for(asking.get_credentials_async(), 10.0)
        finally:
            provider.released.set()
        return [answer, *await asyncio.gather(*first, return_exceptions=True)]

    answer, *others = asyncio.run(ask_together())
    assert answer == (USER, OLD)
    assert [type(other) for other in others] == [StoreUnavailable] * 3


def test_a_provider_that_exits_its_thread() -> None:
    with pytest.raises(StoreUnavailable, match=r"Exiting failed: .*SystemExit"):
        asyncio.run(ProviderLogin(Exiting(), USER).get_credentials_async())


HANGING = """
import time
from redis.credentials import CredentialProvider
from store import StoreUnavailable, open_store

class Hanging(CredentialProvider):
    def get_credentials(self):
        time.sleep(3600.0)

with open_store("URL", connect_timeout_seconds=0.2,
                credential_provider=Hanging()) as store:
    try:
        store.locate("ns", ["k"])
    except StoreUnavailable as error:
        print(error)
"""


def test_a_provider_that_hangs_does_not_hold_the_process(valkey_server: EmbeddedServer) -> None:
    """After the store was closed, too: the program ends."""
    program = [sys.executable, "-c", HANGING.replace("URL", valkey_server.url)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert "no answer in time" in ended.stdout


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:Class", "cannot be made: ModuleNotFoundError: No module named 'no_such_m"),
        ("credential_providers:Missing", "cannot be made: AttributeError"),
        ("credential_providers:fail", "cannot be made: OSError: no metadata service"),
        ("credential_providers:NOT_A_PROVIDER", "is a object; allowed: a redis.credentials.Cred"),
    ],
)
def test_import_paths_that_name_no_provider(path: str, words: str) -> None:
    with pytest.raises(StoreUrlError, match=f"the credential provider '{path}' {words}"):
        load_provider(path)


def test_a_user_needs_a_password_from_somewhere(tmp_path: Path) -> None:
    url = "redis-sentinel://user@127.0.0.1:1/s?sentinel_username=u"
    with pytest.raises(StoreUrlError, match="'store_password'"):
        open_store(url)
    with pytest.raises(StoreUrlError, match="'store_sentinel_password'"):
        open_store(url, password_file=tmp_path)
    open_store(url, password_file=tmp_path, sentinel_password_file=tmp_path)
    open_store(url, credential_provider=Blocking(), sentinel_password_file=tmp_path)
