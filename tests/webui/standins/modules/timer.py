"""Times nothing."""


class Timer:
    def record(self, category):
        pass

    def summary(self):
        return "0.0s"
