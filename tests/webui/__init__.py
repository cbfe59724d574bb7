"""Tests of lib_fp8.webui against stand-ins of the WebUI, which behave as it does where the extension leans on it."""
