"""Which path is which view."""

from __future__ import annotations

from django.urls import path

from examples.django_asgi import views

urlpatterns = [
    path("generation", views.generation),
    path("chat", views.chat),
]
