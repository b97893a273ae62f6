"""Secrets are hidden in reports, trackers and messages; the log file of a rank keeps warnings and
errors, and never ends a job."""

from __future__ import annotations

import logging
import resource
import warnings
from pathlib import Path

import pytest

from hvdtrain.config.schema import Config
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.errors import UserError
from hvdtrain.events.rank_log import LOGGER, rank_log, rank_warnings
from hvdtrain.events.redaction import HIDDEN, is_secret_key, redact, redact_urls
from hvdtrain.training.checkpoint.changes import changes


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("https://joe:hunter2@host/x", "https://***@host/x"),
        ("https://u:p/ss@h/x", "https://***@h/x"),
        ("https://u:p@ss@h/x and //k@l", "https://***@h/x and //***@l"),
        ("https://u:p?s#s@h", "https://***@h"),
        ("https://host/path?mail=a@b", "https://host/path?mail=a@b"),
        ("git+https://host/x@v2 http://h:80/x", "git+https://host/x@v2 http://h:80/x"),
        ("https://h/x?passwd=a&auth=b", "https://h/x?passwd=***&auth=***"),
        ("s3://b/x.tar?X-Amz-Signature=ab12&part=3", "s3://b/x.tar?X-Amz-Signature=***&part=3"),
        ("https://h/x?a=1&access_token=ab%20c", "https://h/x?a=1&access_token=***"),
        ("/scratch/data?", "/scratch/data?"),
        ("batch 64 over 2 ranks", "batch 64 over 2 ranks"),
    ],
)
def test_logins_and_signatures_of_urls_are_hidden(text: str, safe: str) -> None:
    assert redact_urls(text) == safe


def test_secrets_of_nested_and_dotted_keys_are_hidden() -> None:
    tree = {
        "model": {"hub_token": "hf_1", "tokens": 5, "name": "x"},
        "data.options.password": "p",
        "optim.secret_key": None,
        "list": ["//a:b@c"],
    }
    assert redact(tree) == {
        "model": {"hub_token": HIDDEN, "tokens": 5, "name": "x"}, "data.options.password": HIDDEN, "optim.secret_key": None,  # noqa: E501
        "list": [f"//{HIDDEN}@c"],
    }  # fmt: skip


def test_which_keys_name_a_secret() -> None:
    secret = (
        "data.private_key data.account_key data.passphrase data.auth data.auth.user model.hfToken "
        "data.accessToken model.HUBToken a.token2"
    )
    harmless = (
        "model.max_tokens model.tokenizer model.passes data.pass_through data.author data.compass "
        "data.keyframes model.monkey"
    )
    assert (
        [key for key in secret.split() if not is_secret_key(key)]
        == []
        == [key for key in harmless.split() if is_secret_key(key)]
    )


def test_a_changed_secret_is_hidden_in_the_list_of_changes(tmp_path: Path) -> None:
    """These lines go to the terminal, to events.jsonl and to TensorBoard."""
    (tmp_path / "config.yaml").write_text(
        "model:\n  hub_token: hf_FIRST\n  width: 3\ndata:\n  root: https://a:FIRST@h/x\n"
    )
    options = {"hub_token": "hf_SECOND", "width": 4}
    found = changes(tmp_path, Config(model=ModelConfig(**options)))
    assert [str(change) for change in found] == [
        f"changed data.root: https://{HIDDEN}@h/x -> "
        "None", f"changed model.hub_token: {HIDDEN} -> {HIDDEN}", "changed model.width: 3 -> 4",
    ]  # fmt: skip


def test_a_rank_log_has_warnings_and_the_error_and_restores_logging(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ranks" / "rank-00001.log"
    before = warnings.showwarning
    with pytest.raises(ArithmeticError), warnings.catch_warnings():
        warnings.simplefilter("always")
        with rank_warnings(1, 2), rank_log(path):
            LOGGER.info("step 10")
            warnings.warn("late", UserWarning, stacklevel=1)
            raise ArithmeticError("x / 0")
    text = path.read_text()
    assert "step 10" in text and "UserWarning: late" in text and "ArithmeticError: x / 0" in text
    assert (
        "rank 1 on" in (stderr := capsys.readouterr().err)
        and "late" in stderr
        and "step 10" not in stderr
    )
    assert (
        warnings.showwarning is before
        and not LOGGER.isEnabledFor(logging.INFO)
        and not LOGGER.handlers
    )


def test_a_rank_log_drops_lines_silently_on_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with rank_log(tmp_path / "ranks" / "0.log"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            LOGGER.info("step 10")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().err == ""


def test_a_rank_log_that_cannot_be_opened_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("a file")
    with (
        pytest.raises(
            UserError, match="cannot write the log file of a rank: .*\n  where: log.per_rank"
        ),
        rank_log(tmp_path / "ranks" / "0.log"),
    ):
        pass
