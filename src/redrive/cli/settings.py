"""Where a command's settings and its app come from, and how trouble there is told."""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import redrive
from redrive import config
from redrive.app import Redrive
from redrive.config import Config
from redrive.errors import ConfigError, RedriveError

DEFAULT_FILE = Path("redrive.toml")
_OURS = Path(redrive.__file__).parent


def file_of(args: Namespace) -> Path | None:
    """--config, else REDRIVE_CONFIG, else ./redrive.toml if there is one, else the environment alone."""
    named = args.config or os.environ.get("REDRIVE_CONFIG")
    if named:
        return Path(named)
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def settings_of(args: Namespace) -> Config:
    return config.load(file_of(args), profile=profile_of(args))


def profile_of(args: Namespace) -> str | None:
    return args.profile or os.environ.get("REDRIVE_PROFILE") or None


def where(args: Namespace) -> str:
    """The place to name in an error about settings."""
    return str(file_of(args) or "the environment")


def app_of(args: Namespace) -> Redrive:
    """The app that the settings describe. It has no consumers, and the office needs none."""
    settings = settings_of(args)
    try:
        return Redrive(settings=settings)
    except ConfigError as error:
        raise error.at(where(args)) from None


def load_app(target: str, args: Namespace) -> Redrive:
    """The app that somebody's module declares, told of --config and --profile before it is made."""
    if args.config:
        os.environ["REDRIVE_CONFIG"] = args.config
    if args.profile:
        os.environ["REDRIVE_PROFILE"] = args.profile
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise ConfigError(f"{target!r} names no app", key="MODULE:APP", fix="e.g. redrive work orders:app")
    app = _attribute(_imported(name), attribute)
    _check_origin(app, target, args)
    return app


def _imported(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return import_module(name)
    except ConfigError as error:
        raise error.at(_culprit(error) or name) from None
    except RedriveError:
        raise
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            fix = "run it in the folder that holds the module, and leave out .py"
            raise ConfigError(f"there is no module {error.name!r}", key="MODULE:APP", fix=fix) from error
        raise _broken(name, error, f"install {error.name}, or mend the import") from error
    except Exception as error:  # whatever a module raises while it is imported
        raise _broken(name, error, "mend the module") from error


def _broken(name: str, error: Exception, fix: str) -> ConfigError:
    problem = f"importing it failed with {type(error).__name__}: {error}"
    return ConfigError(problem, key=name, where=_culprit(error), fix=fix)


def _culprit(error: Exception) -> str:
    """File and line in the user's code that led to this."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen ")]
    theirs = [frame for frame in frames if _OURS not in Path(frame.filename).parents]
    outside = [frame for frame in theirs if "site-packages" not in frame.filename] or theirs
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else ""


def _attribute(module: ModuleType, name: str) -> Redrive:
    found: Any = getattr(module, name, None)
    if isinstance(found, Redrive):
        return found
    apps = [known for known, value in vars(module).items() if isinstance(value, Redrive)]
    fix = f"use {module.__name__}:{apps[0]}" if apps else f"write {name} = Redrive(…) in it"
    problem = f"has no {name!r}" if found is None else f"{name!r} is {_a(type(found).__name__)}, not a Redrive app"
    raise ConfigError(problem, key=f"{module.__name__}:{name}", where=module.__file__ or "", fix=fix)


def _a(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def _check_origin(app: Redrive, target: str, args: Namespace) -> None:
    """An app that reads another file, or none, would silently ignore what was asked here."""
    file, profile = app.origin or (None, None)
    if args.config and (file is None or file.resolve() != Path(args.config).resolve()):
        problem = f"{target} reads {file or 'no file'}, not {args.config}"
        raise ConfigError(problem, key="--config", fix="make the app with Redrive.from_config(), without a path")
    if args.profile and profile != args.profile:
        problem = f"{target} does not use the profile {args.profile}"
        raise ConfigError(problem, key="--profile", fix="make the app with Redrive.from_config(), without a profile")
