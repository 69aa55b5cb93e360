"""Train a small residual CNN on synthetic images, with data loader workers and gradient accumulation."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    """Images of stripes at an angle; the class is the angle."""

    def __init__(self, size, classes, pixels):
        self.size, self.classes, self.pixels = size, classes, pixels

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        label = index % self.classes
        angle = torch.tensor(3.1416 * label / self.classes)
        y, x = torch.meshgrid(torch.arange(self.pixels), torch.arange(self.pixels), indexing="ij")
        noise = torch.randn(3, self.pixels, self.pixels, generator=torch.Generator().manual_seed(index))
        return torch.sin((x * angle.cos() + y * angle.sin()) / 3) + 0.5 * noise, label


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


class Net(nn.Module):
    def __init__(self, channels, depth, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.body = nn.Sequential(*(Residual(channels) for _ in range(depth)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels, classes))

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=56)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = DataLoader(
        Stripes(args.batches * args.batch_size, 8, 96), args.batch_size, shuffle=True, num_workers=args.workers
    )
    model = Net(channels=8, depth=4, classes=8)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for number, (images, labels) in enumerate(data):
        loss = criterion(model(images), labels)
        (loss / args.accumulate).backward()
        if (number + 1) % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        print(f"batch {number}: loss {loss.item()!r}")
    model.eval()
    with torch.no_grad():
        print("running mean", repr(model.stem[1].running_mean.sum().item()))


if __name__ == "__main__":
    main()
