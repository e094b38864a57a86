"""The least that Django needs; LoadOnce itself needs nothing here."""

from __future__ import annotations

import secrets

DEBUG = False
SECRET_KEY = secrets.token_hex(32)  # nothing here is signed; a real project keeps one
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "examples.django_asgi.urls"
ASGI_APPLICATION = "examples.django_asgi.asgi.application"
INSTALLED_APPS: list[str] = []
MIDDLEWARE: list[str] = []
DATA_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024
USE_TZ = True
