"""As much of an application as a route needs."""


class _Route:
    def __init__(self, path, endpoint, methods, dependencies):
        self.path, self.endpoint, self.methods, self.dependencies = path, endpoint, methods, dependencies


class FastAPI:
    def __init__(self):
        self.routes = [object()]  # a mount has no path to compare

    def add_api_route(self, path, endpoint, *, methods=None, dependencies=None):
        self.routes.append(_Route(path, endpoint, methods, list(dependencies or [])))
