"""A Django project under ASGI whose web workers share one model. No torch in here, and no model.

gunicorn -w 4 -k uvicorn.workers.UvicornWorker examples.django_asgi.asgi:application
"""
