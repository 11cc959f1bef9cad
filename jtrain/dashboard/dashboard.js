// Asks the server what is new, and shows it.
const PERIOD_MS = 2000;
let version = "", asked = 0, timer = 0;

async function ask() {
  clearTimeout(timer);
  const number = ++asked;
  let wait = PERIOD_MS;
  const steps = charts.chosen ? `&first=${charts.chosen[0]}&last=${charts.chosen[1]}` : "";
  const problem = document.getElementById("problem");
  try {
    const answer = await fetch(`data?version=${version}&buckets=${Math.round(charts.width)}${steps}`);
    const data = await answer.json();
    // An answer to an older question would undo a newer one.
    if (number === asked && data.charts) {
      version = data.version;
      if (data.has_more) wait = 100;
      charts.show(data);
      for (const [id, html] of Object.entries(data.blocks)) showBlocks(document.getElementById(id), html);
    }
    problem.textContent = "";
  } catch (error) {
    problem.textContent = `The server does not answer (${error.message}): what is shown may be old.`;
  }
  if (number === asked) timer = setTimeout(ask, wait);
}

function showBlocks(section, html) {
  if (section.dataset.html === html) return;
  section.dataset.html = html;
  const heading = section.querySelector("h2");
  section.innerHTML = html; // made by the templates of every page, which escape all texts
  section.prepend(heading);
}

// Finer lines for the chosen steps, once the hand rests.
charts.onChange = () => {
  version = "";
  clearTimeout(timer);
  timer = setTimeout(ask, 120);
};
ask();
