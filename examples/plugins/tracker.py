"""A tracker that appends the mean reward of each step to a text file."""


class RewardLog:
    def __init__(self, folder, resume_step=None):
        self.path = folder / "rewards.txt"

    def log(self, step, metrics):
        with self.path.open("a") as file:
            file.write(f"{step} {metrics.get('reward/mean', 0.0):.4f}\n")

    def close(self):
        pass
